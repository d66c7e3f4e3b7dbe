"""The card is like a GPU where the budgets need it to be."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from tests.world.card import DEVICE, Card, gpu
from tests.world.models import llama


def test_values_are_those_of_the_cpu():
    with gpu():
        here = torch.arange(6.0).view(2, 3)
        there = here.to(DEVICE)
        assert isinstance(there, Card)
        assert (there.device, there.is_cuda, there.to(DEVICE) is there) == (DEVICE, True, True)
        there[1] += torch.ones(3, device=DEVICE)
        assert (there[:, [2, 0]] @ torch.eye(2, device=DEVICE)).tolist() == [[2, 0], [6, 4]]
        assert there[np.array([1]), None, 1:].cpu().tolist() == [[[5, 6]]]
        assert here.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_mixed_devices_raise_apart_from_single_numbers():
    with gpu():
        there, here = torch.ones(3, device=DEVICE), torch.ones(3)
        with pytest.raises(RuntimeError, match="same device"):
            there + here
        with pytest.raises(RuntimeError, match="same device"):
            torch.cat([here, there])
        assert (there * torch.tensor(2.0)).tolist() == [2, 2, 2]
        with pytest.raises(TypeError, match="can't convert cuda"):
            there.numpy()
        with pytest.raises(TypeError, match="can't convert cuda"):
            np.asarray(there)


@pytest.mark.parametrize(
    ("ask", "uploads", "waits", "bytes"),
    [
        (lambda there, here: here.to(DEVICE, non_blocking=True), 1, 0, 0),
        (lambda there, here: here.to(DEVICE), 1, 1, 0),
        (lambda there, here: torch.tensor([1.0, 2.0], device=DEVICE), 1, 1, 0),
        (lambda there, here: there.new_tensor([1.0, 2.0]), 1, 1, 0),
        (lambda there, here: there.copy_(here, non_blocking=True), 1, 0, 0),
        (lambda there, here: there[torch.tensor([0, 2])], 1, 1, 0),
        (lambda there, here: there[[0, 2]], 1, 1, 0),
        (lambda there, here: there.tolist(), 0, 1, 12),
        (lambda there, here: there.cpu(), 0, 1, 12),
        (lambda there, here: here.copy_(there), 0, 1, 12),
        (lambda there, here: there[0].item(), 0, 1, 4),
        (lambda there, here: bool((there > 0).any()), 0, 1, 1),
        (lambda there, here: there[there > 0], 0, 1, 0),
        (lambda there, here: (there > 0).nonzero(), 0, 1, 0),
        (lambda there, here: torch.equal(there, there), 0, 1, 0),
        (lambda there, here: torch.cuda.synchronize(), 0, 1, 0),
        (lambda there, here: there[1:].view(1, 2).expand(3, 2), 0, 0, 0),
        (lambda there, here: here + here, 0, 0, 0),
    ],
)
def test_uploads_synchronisations_and_bytes_are_counted(ask, uploads, waits, bytes):
    with gpu() as card:
        there, here = torch.ones(3, device=DEVICE), torch.ones(3)
        counts = card.count(lambda: ask(there, here))
    assert (counts.uploads, counts.synchronisations, counts.host_bytes) == (uploads, waits, bytes), counts


def test_the_meta_device_stays_what_it_is():
    with gpu():
        empty = torch.empty(3, device="meta")
        assert not isinstance(empty + torch.zeros_like(empty), Card)
        assert isinstance(torch.ones(3).to(torch.ones(2, device=DEVICE)), Card)


def test_models_that_are_read_from_disk_are_whole(tmp_path):
    text = [[5, 6, 7]]
    with gpu():
        llama().float().save_pretrained(tmp_path)
        read = LlamaForCausalLM.from_pretrained(tmp_path)
        there = read.to(DEVICE)(torch.tensor(text, device=DEVICE)).logits.cpu()
    here = LlamaForCausalLM.from_pretrained(tmp_path)(torch.tensor(text)).logits
    torch.testing.assert_close(there, here.detach())
    torch.testing.assert_close(here, llama().float()(torch.tensor(text)).logits)


def test_operations_inside_models_are_counted_apart_and_views_are_none():
    class Twice(nn.Module):
        def forward(self, numbers):
            return (2 * numbers)[None]

    with gpu() as card:
        there, model = torch.ones(4, 3, device=DEVICE), nn.Sequential(nn.Linear(3, 3), Twice()).to(DEVICE)
        counts = card.count(lambda: (model(there) + 1)[0].unbind(0))
    # One product with its bias, one scaling.
    assert (counts.in_models, counts.operations, counts.uploads, counts.synchronisations) == (2, 1, 0, 0), counts


def test_counting_ends_with_what_is_counted():
    with gpu() as card:
        there = torch.ones(3, device=DEVICE)
        first = card.count(lambda: there + 1)
        there.tolist()
        second = card.count(lambda: there + 1)
    assert (first.operations, first.synchronisations) == (second.operations, second.synchronisations) == (1, 0)
    with pytest.raises(RuntimeError, match="outside gpu"):
        there + 1
