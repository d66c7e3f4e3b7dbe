"""Tasks through a service: each gets what the engine gives it alone, and an end in every case."""

import asyncio
import threading
import time
from dataclasses import dataclass, replace

import numpy as np
import pytest

import outrider
from outrider.constraints.grammar import regex
from outrider.core.inputs import InputError
from outrider.core.types import Sampling
from outrider.drafters.ngram import NgramDrafter
from outrider.engine.generation import Generation
from outrider.serve.errors import Draining, EngineDead, QueueFull, SlowClient, TimedOut
from outrider.serve.limits import Limits
from outrider.serve.run.outputs import OutputTask, RequestSpeculation
from outrider.serve.run.service import Service
from outrider.serve.run.templates import ChatPrompt
from tests.serve.services import GREEDY, made, read, run, serving, task, until
from tests.world.models import drafter_of, engine, free_slots, llama


@dataclass(frozen=True, kw_only=True)
class BrokenDrafter(NgramDrafter):
    """Fails whenever it is asked."""

    def begin(self, states, depths):
        raise RuntimeError("/a/path of this machine")


def slowed(seconds: float = 0.005, **options: object) -> outrider.Engine:
    """An engine whose steps take a while."""
    slow = engine(**options)
    slow.between = lambda: time.sleep(seconds)
    return slow


def mixed(tokenizer) -> list[OutputTask]:
    """64 tasks of many kinds."""
    random = np.random.default_rng(5)
    texts = ("Once upon a time", "The little dog ran to the", "One day, a girl named Lily", "There was a", "He said:")
    speculations = (
        RequestSpeculation(),
        RequestSpeculation(enabled=False),
        RequestSpeculation(max_tokens=1),
        RequestSpeculation(max_context=20),
        RequestSpeculation(drafter="ngram"),
        RequestSpeculation(max_tokens=0),
    )
    tasks = []
    for i in range(64):
        prompt = tokenizer(texts[i % 5] + " and the" * (i % 7))["input_ids"]
        options = Generation(
            max_new_tokens=int(random.integers(1, 24)),
            sampling=Sampling(temperature=0, repetition_penalty=1.3 if i % 11 == 0 else 1.0),
            stop=(" the", ".") if i % 3 == 0 else (),
            logprobs=2 if i % 4 == 0 else None,
            bad_words=("was", "dog") if i % 8 == 3 else (),
            ignore_eos=i % 5 == 0,
            priority=i % 3,
            include_stop=i % 6 == 0,
        )
        spec = speculations[i % len(speculations)]
        tasks.append(OutputTask(id=f"job-{i}", prompt=tuple(prompt), options=options, speculation=spec))
    return tasks


def test_64_mixed_tasks_get_what_the_engine_gives_each_alone():
    busy = outrider.load(max_slots=16, dtype="float32")
    tasks = mixed(busy.tokenizer)
    alone = []
    for each in tasks:
        alone += busy.generate([list(each.prompt)], options=each.options)
        busy.rest()

    async def work(service):
        tickets = []
        for first in range(0, 64, 8):
            tickets += service.submit(tasks[first : first + 8])
            await asyncio.sleep(0.01)
        return await asyncio.gather(*map(read, tickets))

    with serving(busy, drafters={"ngram": NgramDrafter()}) as service:
        found = asyncio.run(asyncio.wait_for(work(service), 120))
        assert service.in_flight == 0
    assert [each.error for each in found] == [None] * 64
    for got, own in zip(found, alone, strict=True):
        assert got.tokens == got.output.tokens == own.tokens
        assert got.text == got.output.text == own.text
        assert (got.output.finish_reason, got.output.stop_reason) == (own.finish_reason, own.stop_reason)
        if own.logprobs is not None:
            assert got.output.logprobs == pytest.approx(own.logprobs, abs=1e-4)
    for i, got in enumerate(found):
        if i % 6 in (1, 5):
            assert got.output.num_draft_tokens == 0
        if i % 6 == 2:
            assert all(update.step.num_draft_tokens <= 1 for update in got.updates)


def test_a_seeded_draw_is_that_of_the_engine():
    drawn = Generation(max_new_tokens=20, sampling=Sampling(temperature=1, seed=7))
    [own] = engine("ngram").generate([[3, 9, 4]], options=drawn)

    async def work(service):
        return await made(service, task("a", options=drawn))

    [got] = run(engine("ngram"), work)
    assert got.tokens == own.tokens


def test_events_say_when_a_task_came_started_and_spoke():
    async def work(service):
        return await made(service, *(task(str(i)) for i in range(3)))

    before = time.monotonic()
    for got in run(engine(max_slots=1), work):
        times = [update.times or update.output.times for update in got.updates]
        assert before < times[0].queued < times[0].admitted <= times[0].first <= times[0].last
        assert times[-1].last > times[0].last
        assert {each.first for each in times} == {times[0].first}
        assert got.output.times == times[-1]


def test_a_cancelled_task_is_gone_within_two_steps_and_the_other_goes_on():
    busy, seen, gate = engine("none"), [], threading.Semaphore(0)

    def between():
        seen.append(set(busy.running))
        gate.acquire(timeout=10)

    busy.between = between

    async def work(service):
        ours, other = service.submit([task("ours", most=100), task("other", most=30)])
        gate.release(3)
        await ours.__anext__()
        ours.cancel()
        ours.cancel()
        at = len(seen)
        gate.release(200)
        rest, whole = await asyncio.gather(read(ours), read(other))
        return at, rest, whole

    at, rest, whole = run(busy, work)
    assert all("ours" not in running for running in seen[at + 1 :])
    assert any("ours" in running for running in seen[:at])
    assert rest.output.finish_reason == "cancelled"
    assert whole.tokens == engine("none").generate([[3, 9, 4]], max_new_tokens=30, sampling=GREEDY)[0].tokens


def test_waiting_and_running_tasks_end_at_their_deadlines():
    async def work(service):
        late = time.monotonic() + 0.1
        found = await made(
            service, task("runs", most=200, deadline=late), task("waits", deadline=late), task("fine", priority=1)
        )
        return found, service.in_flight

    (runs, waits, fine), in_flight = run(slowed(drafter="none", max_slots=1), work)
    assert isinstance(runs.error, TimedOut)
    assert isinstance(waits.error, TimedOut)
    assert (runs.error.status, runs.error.kind, runs.error.code) == (408, "timeout_error", "request_timeout")
    assert runs.updates
    assert not waits.updates
    assert len(fine.output.tokens) == 12
    assert in_flight == 0


def test_a_full_queue_takes_all_tasks_of_a_call_or_none():
    limits = Limits(max_queue=2)

    async def work(service):
        first = service.submit([task("a", most=60)])
        with pytest.raises(QueueFull) as refused:
            service.submit([task("b"), task("c"), task("d")])
        assert service.in_flight == 1
        rest = service.submit([task("b"), task("c")])
        with pytest.raises(QueueFull):
            service.submit([task("d")])
        await asyncio.gather(*map(read, [*first, *rest]))
        await made(service, task("d"))
        return refused.value, service.metrics.value("vllm:admission_rejections_total", reason="queue_full")

    error, rejections = run(slowed(max_slots=1), work, limits=limits)
    assert (error.status, error.kind, error.code) == (429, "rate_limit_error", "queue_full")
    assert 1 <= error.retry_after <= 60
    assert rejections == 2


def test_prompt_tokens_that_wait_are_limited_but_one_long_prompt_is_taken():
    limits = Limits(max_queue_tokens=10)

    async def work(service):
        long = [3, 9] * 20
        first = service.submit([task("a", long, most=60)])
        await until(lambda: service.slots.waiting == 0)
        rest = service.submit([task("b", long)])
        with pytest.raises(QueueFull) as refused:
            service.submit([task("c", [3])])
        await asyncio.gather(*map(read, [*first, *rest]))
        return refused.value.code

    assert run(slowed(max_slots=1), work, limits=limits) == "too_many_tokens_queued"


def test_a_key_has_its_own_limit():
    async def work(service):
        one = service.submit([task("a", owner="x"), task("b", owner="y")])
        with pytest.raises(QueueFull) as refused:
            service.submit([task("c", owner="x")])
        more = service.submit([task("d")])
        await asyncio.gather(*map(read, [*one, *more]))
        await made(service, task("c", owner="x"))
        return refused.value.code

    assert run(slowed(), work, limits=Limits(max_concurrent_per_key=1)) == "too_many_requests_per_key"


def test_texts_of_another_key_are_not_drafted():
    async def work(service):
        steps = []
        for number, owner in enumerate(("x", "y", None, "x")):
            [found] = await made(service, task(str(number), most=24, owner=owner, ignore_eos=True))
            steps.append(found.output.num_steps)
        return steps

    first, other, nobody, again = run(outrider.load(llama(), drafter="suffix", length="fixed:8"), work)
    assert first == other == nobody
    assert again < first


def test_slots_go_to_the_lowest_priority_number_and_then_to_the_first():
    async def work(service):
        first = service.submit([task("first", most=40)])
        await until(lambda: service.slots.waiting == 0)
        names = [("late", 5), ("b", 1), ("a", 0), ("c", 1), ("z", -1)]
        rest = service.submit([task(name, priority=priority) for name, priority in names])
        found = await asyncio.gather(*map(read, [*first, *rest]))
        return sorted((each.updates[0].times.admitted, each.updates[0].id) for each in found)

    order = run(slowed(max_slots=1), work)
    assert [name for _, name in order] == ["first", "z", "a", "b", "c", "late"]


def test_draining_lets_tasks_end_and_refuses_new_ones():
    busy = slowed()

    async def work(service):
        assert service.state == "ready"
        tickets = service.submit([task(str(i), most=30) for i in range(12)])
        draining = asyncio.create_task(service.drain(30))
        await asyncio.sleep(0)
        assert service.state == "draining"
        with pytest.raises(Draining) as refused:
            service.submit([task("late")])
        found = await asyncio.gather(*map(read, tickets))
        await draining
        return refused.value.status, found

    status, found = run(busy, work)
    assert status == 503
    assert [len(each.output.tokens) for each in found] == [30] * 12
    assert free_slots(busy) == [8, 8]


def test_tasks_that_do_not_end_while_draining_get_an_error():
    busy = slowed(0.02)

    async def work(service):
        tickets = service.submit([task(str(i), most=200) for i in range(12)])
        await tickets[0].__anext__()
        slow = asyncio.create_task(service.drain(60))
        await asyncio.sleep(0.05)
        await service.drain(0)
        await slow
        return await asyncio.gather(*map(read, tickets)), service.in_flight

    found, in_flight = run(busy, work)
    assert all(isinstance(each.error, Draining) for each in found)
    assert in_flight == 0
    assert free_slots(busy) == [8, 8]


def test_the_death_of_the_thread_fails_every_job():
    busy, steps = engine("none", max_slots=2), []

    def between():
        steps.append(1)
        if len(steps) == 4:
            raise MemoryError("out of memory")

    busy.between = between

    async def work(service):
        found = await made(service, *(task(str(i), most=50) for i in range(5)))
        await until(lambda: service.state == "engine_dead")
        with pytest.raises(EngineDead) as refused:
            service.submit([task("late")])
        with pytest.raises(EngineDead):
            await service.swap(NgramDrafter())
        return found, refused.value.status, service.in_flight

    found, status, in_flight = run(busy, work)
    assert all(isinstance(each.error, EngineDead) and each.error.status == 500 for each in found)
    assert status == 503
    assert in_flight == 0


def test_a_drafter_that_fails_ends_its_own_request_alone():
    busy = engine("ngram")

    async def work(service):
        bad = task("bad", speculation=RequestSpeculation(drafter="broken"))
        return await made(service, task("a", most=20), bad, task("b", [9, 8, 9, 8, 9], most=20))

    first, bad, last = run(busy, work, drafters={"broken": BrokenDrafter(prompt_lookup_min=1)})
    assert (bad.error.status, bad.error.code) == (500, "internal_error")
    assert "path" not in bad.error.message
    assert "bad" in bad.error.message
    alone = engine("ngram").generate([[3, 9, 4], [9, 8, 9, 8, 9]], max_new_tokens=20, sampling=GREEDY)
    assert [first.tokens, last.tokens] == [output.tokens for output in alone]


def test_what_cannot_be_run_is_refused_before_it_takes_a_place():
    async def work(service):
        for wrong, words in (
            (task("a", []), "the prompt is empty"),
            (task("a", [3] * 400), "the prompt has 400 tokens"),
            (task("a", most=0), "max_new_tokens must be >= 1"),
            (task("a", logprobs=-1), "logprobs must be >= 0"),
            (task("a", speculation=RequestSpeculation(max_tokens=-1)), "speculation.max_tokens must be >= 0"),
            (task("a", speculation=RequestSpeculation(drafter="ngrm")), "unknown speculation.drafter 'ngrm'"),
            (task("a", speculation=RequestSpeculation(verifier="block")), "speculation.verifier 'block' is not served"),
            (task("a", speculation=RequestSpeculation(tree="gumbel")), "speculation.tree 'gumbel' is not served"),
        ):
            with pytest.raises(InputError, match=words):
                service.submit([task("fine"), wrong])
        with pytest.raises(InputError, match="must be unique"):
            service.submit([task("a"), task("a")])
        assert service.in_flight == 0
        named = RequestSpeculation(verifier="token", tree="chain", drafter="own")
        return await made(service, task("a", speculation=named))

    [got] = run(engine("ngram"), work, drafter="own", drafters={"ngram": NgramDrafter()})
    assert len(got.output.tokens) == 12


def test_speculation_stays_below_its_limits():
    async def work(service):
        wanted = {
            "all": RequestSpeculation(),
            "off": RequestSpeculation(enabled=False),
            "zero": RequestSpeculation(max_tokens=0),
            "two": RequestSpeculation(max_tokens=2),
            "near": RequestSpeculation(max_context=10),
            "more": RequestSpeculation(max_tokens=9),
        }
        tasks = [task(name, [5, 6, 7, 5, 6, 7, 5], most=30, speculation=each) for name, each in wanted.items()]
        return dict(zip(wanted, await made(service, *tasks), strict=True))

    found = run(engine("model", gamma=4), work)
    deepest = {name: max(update.step.num_draft_tokens for update in got.updates) for name, got in found.items()}
    assert deepest["off"] == deepest["zero"] == 0
    assert deepest["two"] == 2
    assert deepest["all"] == deepest["more"] == 4
    drafted, length = [], 7
    for update in found["near"].updates:
        drafted.append((length <= 10, update.step.num_draft_tokens))
        length += len(update.tokens)
    assert any(near and count for near, count in drafted)
    assert all(near or not count for near, count in drafted)
    assert len({tuple(got.tokens) for got in found.values()}) == 1


def test_another_drafter_serves_new_tasks_after_a_swap():
    busy = engine("none")

    async def work(service):
        [before] = await made(service, task("a", [9, 8, 9, 8, 9]))
        await service.swap(NgramDrafter(prompt_lookup_min=1))
        [after] = await made(service, task("b", [9, 8, 9, 8, 9]))
        return before, after

    before, after = run(busy, work)
    assert before.tokens == after.tokens
    assert before.output.num_draft_tokens == 0 < after.output.num_draft_tokens


def test_a_client_that_does_not_read_is_cancelled():
    limits = Limits(unsent_bytes=2000, slow_client_seconds=0)

    async def work(service):
        ours, other = service.submit([task("ours", most=200), task("other", most=200)])
        whole = await read(other)
        return await read(ours), whole, service.in_flight

    ours, whole, in_flight = run(slowed(0.001, drafter="none"), work, limits=limits)
    assert isinstance(ours.error, SlowClient)
    assert 0 < len(ours.updates) < 20
    assert len(whole.output.tokens) == 200
    assert in_flight == 0


def test_a_thread_without_a_sign_of_life_counts_as_stalled():
    busy = engine("none")
    busy.between = lambda: time.sleep(0.3)

    async def work(service):
        tickets = service.submit([task("a", most=3)])
        states = set()
        while service.in_flight:
            states.add(service.state)
            await asyncio.sleep(0.01)
        await read(tickets[0])
        await until(lambda: service.state == "ready")
        return states

    assert run(busy, work, limits=Limits(stall_seconds=0.15)) == {"ready", "stalled"}


def test_tasks_of_a_closed_event_loop_are_cancelled():
    busy = slowed(0.01, drafter="none")
    with serving(busy) as service:

        async def leave():
            service.submit([task("left", most=200)])

        asyncio.run(leave())
        deadline = time.monotonic() + 10
        while service.in_flight and time.monotonic() < deadline:
            time.sleep(0.01)
        assert service.in_flight == 0
        [got] = asyncio.run(made(service, task("next")))
        assert len(got.output.tokens) == 12
    assert free_slots(busy) == [8]


def test_texts_and_messages_become_tokens_and_grammars_are_bound_off_the_loop():
    pytest.importorskip("llguidance")
    busy = outrider.load(dtype="float32")

    async def work(service):
        prompt = await service.encode("Once upon a time", special=True)
        options = Generation(max_new_tokens=24, sampling=GREEDY)
        rule = await service.bind(regex("(yes|no)"), options)
        with pytest.raises(InputError, match="cannot be compiled"):
            await service.bind(regex("(yes"), options)
        [got] = await made(
            service,
            OutputTask(id="a", prompt=tuple(prompt), options=Generation(**{**vars(options), "constraint": rule})),
        )
        return prompt, got

    prompt, got = run(busy, work)
    assert prompt == busy.encode("Once upon a time")
    assert got.text in ("yes", "no")


def test_a_chat_template_gets_what_it_reads_and_no_more():
    busy = outrider.load(dtype="float32")
    busy.tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% if thinking %} hm{% endif %}{% endif %}"
    )
    prompt = ChatPrompt(messages=[{"role": "user", "content": "Hello"}])

    async def work(service):
        plain = await service.encode_chat(prompt)
        same = await service.encode_chat(replace(prompt, arguments={"effort": "high"}))
        open_ = await service.encode_chat(replace(prompt, arguments={"thinking": True}))
        none = await service.encode_chat(replace(prompt, generation_prompt=False))
        with pytest.raises(InputError, match="does not read tools"):
            await service.encode_chat(replace(prompt, tools=[{"type": "function", "function": {"name": "f"}}]))
        return [busy.tokenizer.decode(ids) for ids in (plain, same, open_, none)]

    plain, same, open_, none = run(busy, work)
    assert plain.endswith("assistant:")
    assert same == plain
    assert open_ == plain + " hm"
    assert plain == none + "assistant:"


def test_a_service_that_never_started_ends_too():
    idle = Service(engine("none"), names=("tiny",))
    idle.close()
    assert idle.state == "draining"


def test_a_drafter_that_does_not_fit_is_not_offered():
    given = engine("ngram", "match")
    given._refuses = lambda parts: None if isinstance(parts.drafter, NgramDrafter) else "it does not fit"
    with pytest.raises(InputError, match="drafter 'model' cannot be offered: it does not fit"):
        Service(given, names=("tiny",), drafters={"model": drafter_of("model")})
