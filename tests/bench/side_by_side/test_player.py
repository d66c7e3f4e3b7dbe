"""Requests are sent when they are due, and the model's own answers are part of later turns."""

from dataclasses import dataclass, field

import pytest

from outrider import InputError
from outrider.bench.side_by_side.arrivals import ClosedLoop, OpenLoop, Trace
from outrider.bench.side_by_side.player import OutputChunk, Player, request_seed
from outrider.bench.side_by_side.prompts import Encoder
from outrider.bench.workloads.conversation import Conversation

USER = {"role": "user", "content": "x"}


@dataclass
class Time:
    """A clock that moves only when something waits or a server works."""

    now: float = 0.0

    def read(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Server:
    """Answers one token a second to each request, and notes what was sent when."""

    time: Time
    sent: list[tuple[str, float, tuple[int, ...]]] = field(default_factory=list)
    left: dict[str, int] = field(default_factory=dict)
    most: int = 0

    @property
    def busy(self) -> bool:
        return bool(self.left)

    def submit(self, id, prompt, max_new_tokens, seed):
        self.sent.append((id, self.time.now, tuple(prompt)))
        self.left[id] = max_new_tokens
        self.most = max(self.most, len(self.left))

    def advance(self):
        self.time.now += 1.0
        chunks = []
        for id in list(self.left):
            self.left[id] -= 1
            last = self.left[id] == 0
            chunks.append(
                OutputChunk(id=id, num_tokens=1, drafted=2, accepted=0, answer=f"said {id}" if last else None)
            )
            if last:
                del self.left[id]
        return chunks


class OneTokenAMessage(Encoder):
    def __init__(self) -> None:
        self.template = None

    def prompt(self, conversation, answers=()):
        return list(range(len(conversation.messages(answers))))


def played(load, conversations, room=100):
    time = Time()
    server = Server(time)
    player = Player(encoder=OneTokenAMessage(), max_new_tokens=3, room=room, clock=time.read, sleep=time.sleep)
    return player.play(server, conversations, load), server


def talks(count, *, turns=1, **more):
    return [
        Conversation(id=str(i), category="", opening=[USER], replies=((USER,),) * (turns - 1), **more)
        for i in range(count)
    ]


def test_a_closed_loop_keeps_as_many_at_once_and_fills_up_as_they_end():
    served, server = played(ClosedLoop(concurrency=2), talks(5))
    assert server.most == 2
    assert [at for _, at, _ in server.sent] == [0, 0, 3, 3, 6]
    assert [each.ended - each.arrived for each in served] == [3.0] * 5


def test_an_open_loop_sends_at_its_times_whether_requests_ended_or_not():
    load = OpenLoop(rate=2.0, seed=1)
    times = load.times(talks(6))
    served, server = played(load, talks(6))
    assert server.most > 1
    # Waiting for a step counts as waiting: a request arrives when it was to come, not when it could be sent.
    assert sorted(each.arrived for each in served) == pytest.approx(times)
    assert all(at >= each for (_, at, _), each in zip(server.sent, times, strict=True))


def test_gaps_of_an_open_loop_have_the_mean_of_its_rate():
    times = OpenLoop(rate=4.0).times(talks(4000))
    assert times[-1] / 3999 == pytest.approx(0.25, rel=0.05)


def test_a_trace_sends_at_the_workloads_times():
    conversations = [Conversation(id=str(at), category="", opening=[USER], arrives=at) for at in (30.0, 10.0, 14.0)]
    served, server = played(Trace(speed=2.0), conversations)
    assert [id for id, *_ in server.sent] == ["10.0", "14.0", "30.0"]
    assert [each.arrived for each in served] == [0.0, 2.0, 10.0]
    with pytest.raises(InputError, match="has no arrival times"):
        Trace().times(talks(2))


def test_later_turns_hold_the_answers_before_them_and_follow_at_once():
    served, server = played(ClosedLoop(), talks(1, turns=3))
    assert [id for id, *_ in server.sent] == ["0#1", "0#2", "0#3"]
    assert [len(prompt) for *_, prompt in server.sent] == [1, 3, 5]
    assert [each.turn for each in served] == [0, 1, 2]
    assert [at for _, at, _ in server.sent] == [0, 3, 6]


def test_a_conversation_ends_where_the_next_turn_does_not_fit():
    served, _ = played(ClosedLoop(), talks(2, turns=3), room=6)
    assert [each.id for each in served] == ["0#1", "0#2", "1#1", "1#2"]


def test_an_answer_has_the_length_that_its_conversation_names():
    served, _ = played(ClosedLoop(), talks(1, output_tokens=5))
    assert [each.num_tokens for each in served] == [5]
    assert [step.drafted for step in served[0].steps] == [2] * 5


def test_seeds_are_of_the_request_and_not_of_the_order():
    assert request_seed(0, "a") == request_seed(0, "a") < 2**64
    assert len({request_seed(seed, id) for seed in range(3) for id in "abc"}) == 9


@pytest.mark.parametrize("load", [lambda: ClosedLoop(concurrency=0), lambda: OpenLoop(rate=0), lambda: Trace(speed=0)])
def test_loads_that_send_nothing_are_refused(load):
    with pytest.raises(InputError, match="must be >"):
        load()
