"""Attention of few queries over many keys: what float64 says, and the same bits whatever stands beside a query."""

import math

import pytest
import torch
from torch import Tensor

from outrider.lm.forwards.attend import attend, attends, plain_attend

CASTS = True
MOST = {torch.bfloat16: 3.5e-3, torch.float32: 3e-6}
"""Most relative error of all outputs together. In bfloat16 outputs are rounded to eight bits, which is 1.7e-3. Where
the machine multiplies bfloat16, weights are too, and it is 2.2e-3."""
DTYPES = sorted(MOST, key=str)
MASKS = ("none", "bool", "window", "tree", "added", "by head")
SHAPES = [
    # rows, key heads, heads of each, width, view, dim, value dim
    (1, 2, 6, 1, 1, 128, 128),
    (1, 3, 3, 5, 63, 64, 64),
    (2, 1, 9, 2, 64, 80, 80),
    (3, 2, 1, 8, 65, 96, 96),
    (1, 1, 4, 16, 255, 256, 256),
    (2, 2, 2, 17, 257, 64, 40),
    (1, 2, 7, 3, 300, 72, 128),
    (1, 1, 8, 20, 512, 128, 64),
    (4, 2, 5, 4, 700, 64, 64),
    (1, 2, 6, 6, 1100, 128, 128),
]


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def _needs_the_kernel():
    if not attends(torch.device("cpu"), torch.float32):
        pytest.skip("no C++ compiler is here")


def inputs(shape: tuple[int, ...], kind: str, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, ...]:
    """Queries, keys, values and a mask, as a slot cache has them: a part of larger storages."""
    rows, shared, groups, width, view, dim, value_dim = shape
    random = torch.Generator().manual_seed(seed)
    storages = [
        torch.randn(rows, view + 9, shared, size, generator=random).to(dtype)[:, :view].transpose(1, 2)
        for size in (dim, value_dim)
    ]
    queries = 2 * torch.randn(rows, width, shared * groups, dim, generator=random).to(dtype).transpose(1, 2)
    if kind == "none":
        return queries, *storages, None
    heads = shared * groups if kind == "by head" else 1
    seen = torch.rand(rows, heads, width, view, generator=random) < 0.4
    if kind == "window":
        last = torch.randint(0, view, (rows, 1, width, 1), generator=random)
        keys = torch.arange(view)
        seen = (keys <= last) & (keys > last - 30)
    elif kind == "tree":
        # All of a prefix, and among the last keys any.
        seen = seen | (torch.arange(view) < view - width - 5)
    seen[..., view // 2] |= ~seen.any(-1)
    if kind == "added":
        return queries, *storages, torch.where(seen, torch.randn(seen.shape, generator=random), -math.inf).to(dtype)
    return queries, *storages, seen


def exact(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """The same in float64."""
    width, view, groups = queries.shape[2], keys.shape[2], queries.shape[1] // keys.shape[1]
    keys, values = (each.double().repeat_interleave(groups, 1) for each in (keys, values))
    scores = queries.double() @ keys.transpose(2, 3) * queries.shape[-1] ** -0.5
    if mask is None:
        mask = torch.ones(width, view, dtype=torch.bool).tril(view - width)
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.double()
    return (scores.softmax(-1) @ values).transpose(1, 2)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_softmax_attention(dtype, kind):
    for shape in SHAPES:
        case = inputs(shape, kind if kind != "none" or shape[4] >= shape[3] else "bool", dtype)
        right, ours = exact(*case), attend(*case)
        assert ours.dtype == dtype
        assert ours.is_contiguous()
        error = ((ours.double() - right).norm() / right.norm()).item()
        assert error < MOST[dtype], (shape, error)
        plain = plain_attend(*case, case[0].shape[-1] ** -0.5)
        assert plain.shape == ours.shape
        assert ((plain.double() - right).norm() / right.norm()).item() < 4 * MOST[dtype]


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_query_reads_the_same_bits_alone_and_among_others_in_longer_views_and_with_any_threads(dtype, kind):
    differing = 0
    for shape in SHAPES:
        queries, keys, values, mask = inputs(shape, kind if shape[4] >= shape[3] else "bool", dtype)
        torch.set_num_threads(2)
        together = attend(queries, keys, values, mask)
        width, view = queries.shape[2], keys.shape[2]
        if mask is None:
            mask = torch.ones(1, 1, width, view, dtype=torch.bool).tril(view - width).expand(len(keys), -1, -1, -1)
        hidden = False if mask.dtype == torch.bool else -math.inf
        for more, threads in ((0, 1), (1, 2), (64, 1), (300, 2)):
            torch.set_num_threads(threads)
            behind = [torch.randn(*each.shape[:2], more, each.shape[3]).to(dtype) for each in (keys, values)]
            long_keys, long_values = (torch.cat(pair, 2) for pair in zip((keys, values), behind, strict=True))
            long_mask = torch.cat([mask, torch.full((*mask.shape[:3], more), hidden, dtype=mask.dtype)], 3)
            differing += int((attend(queries, long_keys, long_values, long_mask) != together).sum())
            for row, columns in ((0, slice(width - 1, width)), (len(keys) - 1, slice(0, (width + 1) // 2))):
                part = slice(row, row + 1)
                alone = attend(
                    queries[part, :, columns], long_keys[part], long_values[part], long_mask[part, :, columns]
                )
                differing += int((alone != together[part, columns]).sum())
    assert differing == 0


@pytest.mark.parametrize("before", [1, 3, 250, 505])
@pytest.mark.parametrize("kind", ["bool", "added", "window"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_node_of_a_tree_reads_the_same_bits_as_in_a_chain(dtype, kind, before):
    parents = [-1, -1, 0, 0, 1, 2, 4, 3, 6, 5, 8, 10, 11, 12, 13, 7]
    view = before + len(parents) + 3
    queries, keys, values, _ = inputs((1, 2, 3, len(parents), view, 64, 64), "none", dtype)
    mask = torch.zeros(1, 1, len(parents), view, dtype=torch.bool)
    mask[..., max(0, before - 7) if kind == "window" else 0 : before] = True
    paths = list[list[int]]()
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
        mask[0, 0, node, [before + each for each in paths[node]]] = True
    hidden = torch.finfo(dtype).min
    tree = attend(queries, keys, values, torch.where(mask, 0.0, hidden).to(dtype) if kind == "added" else mask)
    for node, path in enumerate(paths):
        chosen = [*range(before), *(before + each for each in path)]
        chain = attend(
            queries[:, :, node : node + 1],
            keys[:, :, chosen],
            values[:, :, chosen],
            mask[:, :, node : node + 1, chosen],
        )
        assert torch.equal(chain[0, 0], tree[0, node])


def test_a_query_that_sees_nothing_reads_zeros_and_changes_no_other():
    queries, keys, values, mask = inputs((2, 2, 3, 4, 600, 64, 64), "bool", torch.float32)
    before = attend(queries, keys, values, mask)
    mask[1, :, 2] = False
    after = attend(queries, keys, values, mask)
    assert not after[1, 2].any()
    after[1, 2] = before[1, 2]
    assert torch.equal(before, after)


def test_keys_that_are_not_seen_may_be_anything():
    queries, keys, values, mask = inputs((1, 2, 3, 4, 600, 64, 64), "bool", torch.bfloat16)
    mask[..., 70:90] = False
    before = attend(queries, keys, values, mask)
    keys[:, :, 70:90] = math.nan
    assert torch.equal(attend(queries, keys, values, mask), before)


@pytest.mark.parametrize("scale", [0.0, 1e-3, 30.0])
def test_large_and_small_scores(scale):
    queries, keys, values, mask = inputs((1, 1, 2, 3, 300, 64, 64), "bool", torch.float32)
    right = exact(queries * (scale * 8), keys, values, mask)
    assert torch.allclose(attend(queries, keys, values, mask, scale).double(), right, atol=1e-4)


def test_the_numbers_of_queries_and_masks_may_lie_anywhere():
    queries, keys, values, mask = inputs((2, 2, 3, 4, 100, 64, 64), "bool", torch.float32)
    before = attend(queries, keys, values, mask)
    spread = torch.stack([queries, queries], -1)[..., 0]
    assert torch.equal(
        attend(spread, keys.contiguous(), values.transpose(2, 3).contiguous().transpose(2, 3), mask), before
    )
    assert torch.equal(attend(queries, keys, values, torch.stack([mask, mask], -1)[..., 0]), before)


def test_other_types_are_torchs():
    queries, keys, values, mask = inputs((1, 2, 3, 4, 100, 64, 64), "bool", torch.float64)
    assert torch.allclose(attend(queries, keys, values, mask), exact(queries, keys, values, mask))


def test_an_exported_graph_serves_all_sizes():
    class Attends(torch.nn.Module):
        def forward(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
            return attend(queries, keys, values, mask)

    case = inputs((2, 2, 3, 4, 100, 64, 64), "bool", torch.float32)
    rows, width, view = (torch.export.Dim(name, min=1, max=4096) for name in ("rows", "width", "view"))
    sizes = ({0: rows, 2: width}, {0: rows, 2: view}, {0: rows, 2: view}, {0: rows, 2: width, 3: view})
    graph = torch.export.export(Attends(), case, dynamic_shapes=sizes, strict=False).module(check_guards=False)
    other = inputs((3, 2, 3, 6, 90, 64, 64), "bool", torch.float32)
    assert torch.equal(graph(*other), attend(*other))
