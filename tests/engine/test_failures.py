"""Requests that fail end with an error; the others lose a step and nothing else, and nothing leaks."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from outrider.core.types import Frontier, Guess, Request, Running, Sampling
from outrider.decoding.protocol import NoDistribution
from outrider.drafters.protocol import Drafter, Observed
from outrider.drafters.token_only import TokenOnly
from outrider.engine.engine import Engine
from outrider.engine.output import Output
from outrider.lm.model import LanguageModel
from outrider.trees.chained import Follow
from tests.engine.test_engine import tokens_of
from tests.world.automaton import After
from tests.world.models import drafter_of, engine, free_slots, target
from tests.world.zoo import VOCAB

pytestmark = pytest.mark.usefixtures("float64_stays_float64")

CALLS = ("open", "begin", "expand", "commit", "observe")


class Broken(Exception):
    """What the tests let drafters raise."""


@dataclass(frozen=True, kw_only=True)
class Failing(TokenOnly):
    """Passes everything on, and raises at the calls that `when` names: the method, and how often it was called."""

    inner: Drafter
    when: set[tuple[str, int]]
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CALLS, 0))
    error: type[BaseException] = Broken

    @property
    def rows(self):
        return self.inner.rows

    def _call(self, name: str) -> None:
        self.counts[name] += 1
        if (name, self.counts[name]) in self.when:
            raise self.error(f"{name} {self.counts[name]}")

    def open(self, request: Request) -> object:
        self._call("open")
        return self.inner.open(request)

    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess:
        self._call("begin")
        return self.inner.begin(states, depths)

    def expand(self, states: Sequence[Running], frontier: Frontier) -> Guess:
        self._call("expand")
        return self.inner.expand(states, frontier)

    def __getattr__(self, name: str) -> object:
        if name != "chain" or not hasattr(self.inner, "chain"):
            raise AttributeError(name)
        return self._chain

    def _chain(self, states: Sequence[Running], counts: Sequence[int]) -> Follow:
        follow = self.inner.chain(states, counts)

        def step(tokens: torch.Tensor) -> torch.Tensor:
            self._call("expand")
            return follow(tokens)

        return step

    def commit(self, states: Sequence[Running], paths: Sequence[Sequence[int]]) -> None:
        self._call("commit")
        self.inner.commit(states, paths)

    def observe(self, states: Sequence[Running], observed: Observed) -> None:
        self._call("observe")
        self.inner.observe(states, observed)

    def needs(self, state: object, length: int) -> int:
        return self.inner.needs(state, length)

    def reuse(self, state: object, request: Request, length: int) -> object:
        return self.inner.reuse(state, request, length)

    def close(self, state: object) -> None:
        self.inner.close(state)


def requests(count: int = 4) -> list[Request]:
    return [
        Request(id=str(i), prompt=(3 + i, 9, 4, 9, 4), max_new_tokens=12, sampling=Sampling(temperature=1.0, seed=i))
        for i in range(count)
    ]


def run(busy: Engine, these: Sequence[Request]) -> dict[str, Output]:
    for request in these:
        busy.add(request)
    found = {}
    while busy.busy:
        found |= {update.id: update.output for update in busy.step() if update.output is not None}
    return found


def inner_slots(busy: Engine) -> list[int]:
    if isinstance(busy.parts.drafter, Failing):
        busy.rest()
        busy.swap(busy.parts.drafter.inner)
    return free_slots(busy)


@pytest.mark.parametrize("call", ["begin", "expand", "commit", "observe"])
@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_a_drafter_that_raises_once_in_a_batch_changes_no_output(drafter, call):
    expected = tokens_of(run(engine(drafter), requests()))
    at = 2
    busy = engine(Failing(inner=drafter_of(drafter), when={(call, at)}))
    outputs = run(busy, requests())
    assert busy.parts.drafter.counts[call] > at
    assert {output.finish_reason for output in outputs.values()} == {"length"}
    assert tokens_of(outputs) == expected
    assert inner_slots(busy) == [8] * (2 if drafter == "model" else 1)


def test_only_the_request_at_fault_ends_and_says_why():
    def explode(ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] > 9:
            raise Broken("too long for me")
        return scores

    these = requests()
    expected = tokens_of(run(engine("model"), these))
    these[2] = replace(these[2], sampling=replace(these[2].sampling, processors=(explode,)))
    busy = engine("model")
    outputs = run(busy, these)
    assert [output.finish_reason for _, output in sorted(outputs.items())] == ["length", "length", "error", "length"]
    assert isinstance(outputs["2"].error, Broken)
    assert 0 < len(outputs["2"].tokens) <= 5
    assert outputs["2"].tokens == expected["2"][: len(outputs["2"].tokens)]
    assert {id: tokens for id, tokens in tokens_of(outputs).items() if id != "2"} == {
        id: tokens for id, tokens in expected.items() if id != "2"
    }
    assert free_slots(busy) == [8, 8]


def test_a_request_that_cannot_be_opened_or_prefilled_ends_and_frees_its_slot():
    busy = engine(Failing(inner=drafter_of("model"), when={("open", 2), ("observe", 3)}))
    # Prompts of different length are prefilled one by one, the longest first.
    these = [replace(r, prompt=r.prompt * size) for r, size in zip(requests(), (20, 1, 30, 10), strict=True)]
    outputs = run(busy, these)
    assert [output.finish_reason for _, output in sorted(outputs.items())] == ["length", "error", "length", "error"]
    assert [output.num_steps for _, output in sorted(outputs.items()) if output.error] == [0, 0]
    assert inner_slots(busy) == [8, 8]


def test_generate_and_stream_raise_what_ended_a_request_and_leave_the_engine_usable():
    busy = engine(Failing(inner=drafter_of("model"), when={("begin", 2), ("begin", 6)}))
    with pytest.raises(Broken, match="begin 2"):
        busy.generate([[3, 4, 5]], max_new_tokens=20)
    assert not busy.busy
    with pytest.raises(Broken, match="begin 6"):
        list(busy.stream([3, 4, 5], max_new_tokens=60))
    assert len(busy.generate([[3, 4, 5]], max_new_tokens=20)[0].tokens) == 20
    assert inner_slots(busy) == [8, 8]


@pytest.mark.parametrize("call", ["begin", "commit", "observe"])
def test_an_interrupted_step_is_taken_back(call):
    expected = tokens_of(run(engine("model"), requests()))
    at = 2
    busy = engine(Failing(inner=drafter_of("model"), when={(call, at)}, error=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run(busy, requests())
    outputs = run(busy, [])
    assert tokens_of(outputs) == expected
    assert inner_slots(busy) == [8, 8]


@pytest.mark.parametrize("error", [Broken, KeyboardInterrupt])
@pytest.mark.parametrize("call", ["expand", "commit", "observe"])
def test_a_step_that_is_taken_back_takes_its_constraint_back(call, error):
    """Where `observe` fails, the constraint has been told of the step's tokens already."""
    rule = After(vocab=VOCAB, followers={t: frozenset({(t + 1) % 8 + 3, t % 8 + 3}) for t in range(3, 11)})
    these = [replace(request, constraint=rule) for request in requests()]
    expected = tokens_of(run(engine("model"), these))
    busy = engine(Failing(inner=drafter_of("model"), when={(call, 2)}, error=error))
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            run(busy, these)
        these = []
    outputs = run(busy, these)
    assert tokens_of(outputs) == expected
    assert all(rule.fits(output.tokens) for output in outputs.values())


@dataclass(frozen=True, kw_only=True)
class Listener(TokenOnly):
    """Wants hidden states, and keeps which tokens it has heard of."""

    inner: Drafter = field(default_factory=lambda: drafter_of("ngram"))

    @property
    def taps(self) -> tuple[int, ...]:
        return (1,)

    def open(self, request: Request) -> list[int]:
        return []

    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess:
        for state in states:
            assert state.drafter_state == state.tokens[:-1], state.request.id
        return Guess(tokens=torch.tensor([3] * len(states)).numpy())

    def expand(self, states: Sequence[Running], frontier: Frontier) -> Guess:
        return Guess(tokens=torch.full((len(frontier.nodes),), 4).numpy())

    def observe(self, states: Sequence[Running], observed: Observed) -> None:
        for i, state in enumerate(states):
            state.drafter_state.extend(observed.tokens[observed.offsets[i] : observed.offsets[i + 1]].tolist())


def test_a_drafter_that_reads_the_target_is_shown_everything_again_after_a_failure():
    @dataclass(frozen=True, kw_only=True)
    class FailingListener(Failing):
        @property
        def taps(self) -> tuple[int, ...]:
            return (1,)

    busy = engine(FailingListener(inner=Listener(), when={("commit", 3)}))
    outputs = run(busy, requests())
    assert {output.finish_reason for output in outputs.values()} == {"length"}
    assert tokens_of(outputs) == tokens_of(run(engine(Listener()), requests()))


def with_nan_at(token: int) -> LanguageModel:
    """The target with an embedding that is not a number: texts with this token have no law."""
    lm = target()
    with torch.no_grad():
        lm.model.get_input_embeddings().weight[token] = torch.nan
    return lm


@pytest.mark.parametrize("setting", [Sampling(temperature=0.0, seed=1), Sampling(temperature=1.0, seed=1)])
@pytest.mark.parametrize("drafter", ["model", "ngram", "none"])
def test_a_request_whose_target_gives_no_number_ends_by_a_named_error_and_its_neighbours_go_on(drafter, setting):
    # The token is never drafted: it would spoil the forward in which it is read.
    busy, setting = engine(drafter), replace(setting, logit_bias={63: -torch.inf})
    expected = [out.tokens for out in busy.generate([[5, 9, 4], [8, 8, 2, 8]], max_new_tokens=12, sampling=setting)]
    busy.parts = replace(busy.parts, target=with_nan_at(63))
    made = busy.generate([[5, 9, 4], [3, 63, 3], [8, 8, 2, 8]], max_new_tokens=12, sampling=setting, errors="return")
    assert [made[0].tokens, made[2].tokens] == expected
    assert (made[1].finish_reason, made[1].tokens) == ("error", [])
    assert isinstance(made[1].error, NoDistribution)
    assert "logits are not numbers" in str(made[1].error)
