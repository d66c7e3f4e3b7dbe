"""Attention of training: what groups read is what they read with a mask over all keys, and so are the gradients."""

import pytest
import torch
from torch import Tensor

from outrider.learning import attention
from outrider.learning.attention import among_own
from outrider.lm.head import attend


def example(groups: int, size: int, own: int, *, scattered: bool, shared: int = 2) -> list[Tensor]:
    """Random queries, keys and values of 3 rows and 4 heads behind a context of 5 keys, and the mask over all keys."""
    torch.manual_seed(0)
    rows, heads, dim, context = 3, 4, 8, 5
    queries = torch.randn(rows, heads, groups * size, dim, dtype=torch.float64)
    keys, values = (torch.randn(rows, shared, context + groups * own, dim, dtype=torch.float64) for _ in range(2))
    of_query = torch.arange(groups).repeat_interleave(size)
    of_key = torch.arange(groups).repeat(own) if scattered else torch.arange(groups).repeat_interleave(own)
    apart = (of_query[:, None] == of_key).expand(rows, -1, -1)
    # Some of a group's own keys are hidden too, but for one of them.
    some = (torch.rand(rows, groups * size, groups * own) < 0.7) & apart
    some |= apart & (apart.cumsum(-1) == 1)
    mask = torch.cat([torch.rand(rows, groups * size, context) < 0.5, some], -1)[:, None]
    return [queries, keys, values, mask]


@pytest.mark.parametrize("shared", [1, 2, 4])
@pytest.mark.parametrize(
    ("groups", "size", "own", "scattered"), [(3, 4, 4, False), (6, 1, 3, True), (2, 3, 2, True), (1, 2, 5, False)]
)
def test_as_with_a_mask_over_all_keys(groups: int, size: int, own: int, scattered: bool, shared: int) -> None:
    *given, mask = example(groups, size, own, scattered=scattered, shared=shared)
    found = []
    for each in (attend, lambda *all_: among_own(*all_, context=5, groups=groups, scattered=scattered)):
        inputs = [tensor.clone().requires_grad_() for tensor in given]
        read = each(*inputs, mask)
        read.square().sum().backward()
        found.append([read, *(tensor.grad for tensor in inputs)])
    for plain, apart in zip(*found, strict=True):
        torch.testing.assert_close(apart, plain)


def test_keys_of_other_groups_are_not_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "attend", lambda *_: pytest.fail("all keys were attended to"))
    *given, mask = example(3, 4, 4, scattered=False)
    found = among_own(*given, mask, context=5, groups=3, scattered=False)
    # The last group's keys change nothing for the others.
    given[1][:, :, -4:] = torch.nan
    changed = among_own(*given, mask, context=5, groups=3, scattered=False)
    torch.testing.assert_close(changed[:, :, :8], found[:, :, :8], rtol=0, atol=0)


def test_a_kernel_that_keeps_no_scores_where_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    *given, mask = example(3, 4, 4, scattered=False)
    few = among_own(*given, mask, context=5, groups=3, scattered=False)
    monkeypatch.setattr(attention, "MOST_SCORES", 3 * 4 * 12 * 9 - 1)
    monkeypatch.setattr(torch.Tensor, "softmax", lambda *_, **__: pytest.fail("scores were kept"))
    torch.testing.assert_close(among_own(*given, mask, context=5, groups=3, scattered=False), few)
