"""The twin of CUDA graphs raises where a graph would compute another thing."""

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.world.recorder import CheckedRecorder


def recorder() -> CheckedRecorder:
    return CheckedRecorder(torch.device("cpu"))


def test_a_replay_computes_with_what_the_inputs_hold_then() -> None:
    given = torch.tensor([1.0, 2.0])
    kept = recorder().record(lambda: [given * 2], [given])
    given.copy_(torch.tensor([5.0, 7.0]))
    kept.replay()
    assert kept.outputs[0].tolist() == [10, 14]


def test_an_input_that_is_not_filled_again_is_nonsense() -> None:
    given, index = torch.zeros(2), torch.zeros(1, dtype=torch.long)
    kept = recorder().record(lambda: [given[index]], [given, index])
    kept.replay()
    assert given.isnan().all()
    given.zero_()
    with pytest.raises(IndexError):
        kept.replay()


def test_an_output_does_not_outlive_the_next_replay_of_any_recording() -> None:
    given, record = torch.ones(1), recorder().record
    one, other = (record(lambda: [given + 1], []) for _ in range(2))
    one.replay()
    early = one.outputs[0]
    assert early.item() == 2
    other.replay()
    assert early.isnan().all()


def test_memory_that_moved_raises() -> None:
    held = [torch.ones(2)]
    kept = recorder().record(lambda: [held[0] + 1], [])
    held[0] = torch.ones(2)
    with pytest.raises(AssertionError, match="was recorded as"):
        kept.replay()


def test_a_number_of_the_host_that_changed_raises() -> None:
    held, given = [1], torch.ones(4)
    kept = recorder().record(lambda: [given[: held[0]] + 1], [])
    held[0] = 2
    with pytest.raises(AssertionError, match="was recorded as"):
        kept.replay()


@pytest.mark.parametrize("make", [torch.tensor, lambda numbers: torch.from_numpy(np.array(numbers))])
def test_a_tensor_that_is_made_of_numbers_of_the_host_cannot_be_recorded(make) -> None:
    given = torch.ones(1)
    with pytest.raises(RuntimeError, match="lift_fresh is not permitted"):
        recorder().record(lambda: [given + make([2.0])], [])


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("ask", [Tensor.item, bool, Tensor.nonzero], ids=["item", "bool", "nonzero"])
def test_what_waits_for_the_device_cannot_be_recorded(ask, inference) -> None:
    given = torch.ones(1)
    with pytest.raises(RuntimeError, match="not permitted"), torch.inference_mode(inference):
        recorder().record(lambda: [given * ask(given)], [])
