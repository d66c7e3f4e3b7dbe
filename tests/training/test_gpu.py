"""Training on a GPU: no wait in a step, and the states of the target as a CPU has them."""

import pytest
import torch

from outrider.training.data.capture import capture
from outrider.training.data.shards import Contents
from tests.training.test_capture import SMALL, corpus
from tests.training.test_waits import OF_THE_MODEL, learner
from tests.world.heads import TRAINED
from tests.world.learners import batch
from tests.world.zoo import tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.mark.parametrize("kind", [kind for kind in TRAINED if kind not in OF_THE_MODEL])
def test_no_head_waits_in_its_forward_or_backward(kind: str) -> None:
    device, made = torch.device("cuda"), learner(kind, device="cuda")
    given = made.with_states(batch().pinned().to(device))
    # What is made once, such as tables of positions, may wait.
    made(given).total.backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = made(given)
        loss.total.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.no_grad():
        there = learner(kind)
        same = there(there.with_states(batch()))
    assert float(loss.total) == pytest.approx(float(same.total), rel=1e-3)


@pytest.mark.usefixtures("float64_stays_float64")
def test_captured_states_are_those_of_a_cpu() -> None:
    documents, contents = corpus(), Contents(taps=(0, 2), logits="all")
    here = capture(tiny("llama"), documents, contents, way=SMALL)
    there = capture(tiny("llama").cuda(), documents, contents, way=SMALL)
    for number in range(len(documents)):
        one, other = here.states(number), there.states(number)
        assert all(torch.allclose(one.hidden[tap], other.hidden[tap], atol=1e-9) for tap in contents.taps)
        assert torch.allclose(one.logits, other.logits, atol=1e-9)
