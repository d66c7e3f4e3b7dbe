"""A step of training asks nothing of the device that a GPU's host would have to wait for, and is the same for it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outrider import catalog
from outrider.core.types import InputError
from outrider.heads.objective import HeadContext, HeadObjective
from outrider.learning.batch import TrainBatch, on_device
from outrider.training.loop.optimizer import adamw
from outrider.training.loop.prefetch import Prefetch, StepData
from outrider.training.loop.settings import TrainSettings
from outrider.training.loop.steps import settled
from tests.training.learners import Bigram
from tests.training.learners import batches as bigrams
from tests.world.heads import TRAINED
from tests.world.learners import batch, documents
from tests.world.package import PACKAGE
from tests.world.zoo import tiny

ASKING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "bincount", "is_nonzero")
"""Operators whose result the host must know before it goes on."""
ON_CPUS = ("_mean",)
"""Functions that ask on a CPU alone."""
OF_THE_MODEL = {"griffin": {"kept"}}
"""Heads that learn where their own guesses were good, which the device alone knows, and where that is asked."""


class Waits(TorchDispatchMode):
    """Notes the functions of Outrider in which a GPU's host would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        chosen = name.startswith(("index", "_index")) and any(
            isinstance(each, torch.Tensor) and each.dtype == torch.bool for each in tree_leaves(args[1])
        )
        if name in ASKING or chosen:
            self.places.append(_place())
        return func(*args, **(kwargs or {}))


def _place() -> str:
    """The innermost function of Outrider that is running."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return frame.f_code.co_name


@contextmanager
def waits() -> Iterator[list[str]]:
    """Where a GPU's host would wait in the body."""
    with Waits() as found:
        yield found.places


def learner(kind: str, device: str = "cpu", **options: Any) -> HeadObjective:
    spec, model = catalog.rows("drafter")[kind].kind, tiny("llama").float().requires_grad_(False).to(device)
    context = HeadContext(target=model, documents=documents(), depth=3)
    made: HeadObjective = spec.learner(spec.options(**options), context)
    return made.train()


def asked(made: HeadObjective) -> set[str]:
    """Where the host waits in a step's forward and backward. The target's states are known before."""
    given = made.with_states(batch())
    with waits() as places:
        made(given).total.backward()
    return set(places) - set(ON_CPUS)


@pytest.mark.parametrize("kind", TRAINED)
def test_no_head_waits_in_its_forward_or_backward(kind: str) -> None:
    assert asked(learner(kind)) == OF_THE_MODEL.get(kind, set())


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("parallel", {"num_groups": 2}),
        ("dflash", {"slot_balanced": True}),
        ("dflash", {"weighting": "survival"}),
        ("eagle", {"noise": 0.1}),
        ("eagle3", {"divergence": "ce"}),
    ],
    ids=str,
)
def test_options_of_heads_make_none_wait(kind: str, options: dict[str, Any]) -> None:
    assert asked(learner(kind, **options)) == set()


def test_a_wait_is_noted() -> None:
    def ask(tensor: torch.Tensor) -> None:
        int(tensor.sum())
        tensor[tensor > 0]
        tensor[torch.tensor([0])]

    with waits() as places:
        ask(torch.ones(3))
    assert len(places) == 2


def test_a_batch_on_a_device_knows_its_rows_on_the_host() -> None:
    given = batch()
    moved = given.to(torch.device("meta"))
    # A device without values could not tell them.
    assert moved.tokens.is_meta
    assert np.array_equal(moved.host.tokens, given.tokens.numpy())
    assert np.array_equal(moved.host.learnt, given.learnt.numpy())
    assert moved.host.lengths.tolist() == given.lengths.tolist()
    assert given.to(torch.device("cpu")) is given
    assert on_device(np.arange(3), torch.device("meta")).is_meta


def data(step: int) -> StepData:
    made = bigrams().batch(step)
    return StepData(parts=[made], num_learnt=int(made.learnt.sum()))


def test_data_is_made_one_step_ahead_and_is_that_of_its_step() -> None:
    asked = list[int]()

    def make(step: int) -> StepData:
        asked.append(step)
        return data(step)

    ahead = Prefetch(make, steps=4)
    for step in (0, 1, 2, 3):
        [found] = ahead(step).parts
        assert torch.equal(found.tokens, bigrams().batch(step).tokens)
    ahead.close()
    assert asked == [0, 1, 2, 3]


def test_data_that_cannot_be_made_is_an_error_of_its_own_step() -> None:
    def make(step: int) -> StepData:
        if step == 1:
            raise InputError("document 7 has no token to learn")
        return data(step)

    ahead = Prefetch(make, steps=3)
    assert ahead(0).num_learnt > 0
    with pytest.raises(InputError, match="document 7"):
        ahead(1)
    ahead.close()


def test_precision_is_that_of_the_device_unless_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    for halves in (True, False):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, halves=halves: halves)
        assert settled(TrainSettings(), gpu).precision == ("bf16" if halves else "no")
        assert settled(TrainSettings(), cpu).precision == "no"
        assert settled(TrainSettings(precision="fp16"), gpu) == TrainSettings(precision="fp16")


def test_adamw_is_one_kernel_on_a_gpu_and_steps_the_same_way() -> None:
    found = []
    for device in ("cpu", "cuda"):
        made = Bigram(dropout=0)
        steps = adamw(made, replace(TrainSettings(), learning_rate=0.03), torch.device(device))
        assert steps.defaults["fused"] == (True if device == "cuda" else None)
        for step in range(3):
            given: TrainBatch = bigrams().batch(step)
            loss = made(given)
            (loss.total / loss.weight).backward()
            steps.step()
            steps.zero_grad()
        found.append(made.state_dict())
    for name, tensor in found[0].items():
        assert torch.allclose(tensor, found[1][name], atol=1e-6), name
