"""A drafter that learns, or is replaced, while a service runs: nobody loses a token, and nothing old stays."""

import asyncio
import gc
import logging
import threading
import weakref
from pathlib import Path

import pytest
import torch

from outrider.core.inputs import InputError
from outrider.drafters.model import ModelDrafter
from outrider.serve.run.learner import OnlineLearner
from outrider.serve.run.outputs import RequestSpeculation
from outrider.training.online.learning import Learning
from outrider.training.online.pupil import OnlineSettings
from tests.serve.services import GREEDY, made, read, run, task
from tests.world.models import drafter_of, engine, free_slots

PROMPTS = [[3 + i % 9, 5, 6, 4 + i % 7] for i in range(15)]
LONG = list(range(3, 33))


def learning(busy, **options) -> OnlineLearner:
    """An engine that learns from every second request, in a thread."""
    settings = OnlineSettings(**{"interval": 2, "learning_rate": 3e-3, "in_thread": True, **options})
    return OnlineLearner(busy, Learning(busy, settings))


def weights(drafter: ModelDrafter) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in drafter.lm.model.parameters()]


def test_requests_during_a_swap_keep_their_weights_and_new_ones_get_the_newest() -> None:
    busy, seen = engine("model", max_slots=4), {}

    def look(cycle) -> None:
        for state in cycle.states:
            seen.setdefault(state.request.id, set()).add(id(state.drafter))

    busy.watch = look
    learner = learning(busy)

    async def work(service):
        [long] = service.submit([task("long", [3, 9, 4], most=100)])
        reading = asyncio.create_task(read(long))
        found = []
        for first in range(0, 15, 3):
            tasks = [task(f"{first + k}", PROMPTS[first + k], most=8) for k in range(3)]
            found += await made(service, *tasks)
        return found, await reading

    found, whole = run(busy, work, learns=True)
    learner.finish()
    assert learner.num_rounds >= 3
    alone = engine("none")
    outputs = alone.generate([*PROMPTS, [3, 9, 4]], max_new_tokens=8, sampling=GREEDY)
    assert [each.tokens for each in found] == [output.tokens for output in outputs[:15]]
    assert whole.tokens == alone.generate([[3, 9, 4]], max_new_tokens=100, sampling=GREEDY)[0].tokens
    assert {len(drafters) for drafters in seen.values()} == {1}
    assert len(set.union(*seen.values())) >= 3
    assert seen["long"] != seen["14"]
    assert free_slots(busy)[0] == 4


def test_a_mistake_in_learning_ends_the_learning_alone(caplog: pytest.LogCaptureFixture) -> None:
    busy = engine("model")
    learner = learning(busy)
    [pupil] = learner._learning.pupils

    def fails(lessons):
        raise MemoryError("no memory left for training")

    pupil.draft.learn = fails

    async def work(service):
        for i in range(8):
            [got] = await made(service, task(str(i), PROMPTS[i], most=8))
            assert len(got.output.tokens) == 8
        return service.state

    with caplog.at_level(logging.ERROR, "outrider.serve"):
        assert run(busy, work, learns=True) == "ready"
    assert "the draft model has stopped learning" in caplog.text
    learner.finish()


def test_steps_and_snapshots_are_made_in_another_thread(tmp_path: Path) -> None:
    busy, threads = engine("model"), set()
    learner = learning(busy, interval=1, snapshots=tmp_path / "kept", snapshot_interval=1)
    [pupil] = learner._learning.pupils
    learn, save = pupil.draft.learn, pupil._save
    pupil.draft.learn = lambda lessons: (threads.add(threading.current_thread().name), learn(lessons))[1]
    pupil._save = lambda: (threads.add(threading.current_thread().name), save())[1]

    async def work(service):
        for i in range(6):
            await made(service, task(str(i), PROMPTS[i], most=8))

    run(busy, work, learns=True)
    assert threads
    assert not any(name.startswith("outrider-engine") for name in threads)
    learner.finish()


def test_what_was_learnt_goes_on_after_a_kill(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    settings = {"interval": 1, "snapshots": kept, "snapshot_interval": 1, "resume": True, "in_thread": False}
    first = engine("model")
    learner = learning(first, **settings)
    first.generate(PROMPTS[:4], max_new_tokens=8, sampling=GREEDY)
    # The process is killed here, in the middle of a snapshot: it ends nothing, and leaves a half.
    names = sorted(path.name for path in kept.iterdir())
    assert names[-1] == f"step-{learner.num_rounds:06d}"
    (kept / ".step-000099.0a1b.unfinished").mkdir()
    (kept / ".step-000099.0a1b.unfinished" / "model.safetensors").write_bytes(b"half")
    second = engine("model")
    again = learning(second, **settings)
    assert again.num_rounds == learner.num_rounds
    assert sorted(path.name for path in kept.iterdir()) == names
    newest = learner._learning.pupils[0].draft.master.parameters()
    assert all(torch.equal(*pair) for pair in zip(weights(second.parts.drafter), newest, strict=True))
    outputs = second.generate(PROMPTS[:4], max_new_tokens=8, sampling=GREEDY)
    expected = engine("none").generate(PROMPTS[:4], max_new_tokens=8, sampling=GREEDY)
    assert [output.tokens for output in outputs] == [output.tokens for output in expected]
    again.finish()
    (kept / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="holds other files too; give a new one"):
        learning(engine("model"), **settings)


def test_a_snapshot_that_is_no_model_of_this_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "step-000001").mkdir()
    (tmp_path / "step-000001" / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"step-000001 cannot be read: .*; delete it"):
        learning(engine("model"), snapshots=tmp_path, resume=True)


def test_old_drafters_are_let_go_with_their_last_request() -> None:
    busy, old = engine("model", max_slots=4), []

    async def work(service):
        for turn in range(3):
            old.append(weakref.ref(busy.parts.drafter.lm.model))
            [long] = service.submit([task(f"long {turn}", [*LONG, turn + 3], most=40)])
            await long.__anext__()
            fresh = drafter_of("model", max_slots=4)
            await service.swap(fresh)
            # The name of the server's own drafter still means the first one.
            service.drafters[service.drafter] = fresh
            del fresh
            await asyncio.gather(read(long), made(service, task(f"short {turn}", PROMPTS[turn], most=4)))
        return [
            each.output.reused_tokens
            for got in await made(service, task("next", [*LONG, 5, 7, 8]))
            for each in got.updates[-1:]
        ]

    [reused] = run(busy, work)
    gc.collect()
    assert [model() for model in old] == [None] * 3
    # What the target has read does not depend on the drafter.
    assert reused >= len(LONG)


def test_nobody_replaces_a_drafter_that_learns() -> None:
    busy = engine("model")
    learner = learning(busy)

    async def work(service):
        with pytest.raises(InputError, match="learns from its requests, so nobody else replaces it"):
            service.swap(drafter_of("model"))
        [named] = await made(service, task("a", speculation=RequestSpeculation(drafter=service.drafter)))
        return named.output.num_draft_tokens

    assert run(busy, work, learns=True) > 0
    learner.finish()
