"""A head as a small language model of its own: slots, trees, blocks and raggedness against plain recomputation."""

import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from outrider.lm.head import HeadLM, sees_all
from outrider.lm.protocol import Segment
from outrider.lm.slots.head_inputs import HeadInputs
from outrider.lm.target_info import TargetInfo
from tests.world.heads import ToyModule, toy
from tests.world.models import target

pytestmark = pytest.mark.usefixtures("float64_stays_float64")


class Everything:
    """A cache that keeps what it is shown, for one row."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        if layer_idx in self.kept:
            keys, values = (
                torch.cat([old, new], 2) for old, new in zip(self.kept[layer_idx], (keys, values), strict=True)
            )
        self.kept[layer_idx] = (keys, values)
        return keys, values


def head(kind: str = "own features") -> HeadLM:
    return toy(kind, TargetInfo.of(target(4), None)).lm


def recomputed(
    module: ToyModule,
    tokens: list[int],
    features: Float[Tensor, "n dim"] | None,
    mask: Float[Tensor, "n n"] | None = None,
) -> tuple[Float[Tensor, "n vocab"], Float[Tensor, "n dim"]]:
    """Logits, and what is output, of a whole text at once."""
    count = len(tokens)
    seen = torch.ones(count, count).tril().bool()[None, None]
    ids, positions = torch.tensor([tokens]), torch.arange(count)[None]
    inputs = HeadInputs(tokens=ids, features=features[None], positions=positions, mask=seen, cache=Everything())
    hidden = module(inputs)
    return module.logits(hidden)[0], hidden[0]


@torch.inference_mode()
def test_ragged_chains_and_trees_in_slots_say_what_recomputation_says() -> None:
    lm, dice = head(), torch.Generator().manual_seed(1)
    size = lm.module.feature_size
    texts = [[5, 9, 4, 7, 11], [3, 8], [6] * 7]
    given = [torch.randn(len(text), size, dtype=torch.float64, generator=dice) for text in texts]
    slots = [lm.open() for _ in texts]
    for first, end in ((0, 2), (2, None)):
        pieces = [
            Segment(slot=s, tokens=torch.tensor(t[first:end]), features=f[first:end])
            for s, t, f in zip(slots, texts, given, strict=True)
            if t[first:end]
        ]
        said = lm.extend(pieces)
        lm.commit({piece.slot: range(len(piece.tokens)) for piece in pieces})
        expected = [recomputed(lm.module, t, f) for t, f in zip(texts, given, strict=True) if t[first:end]]
        assert float((said.logits - torch.cat([e[0][first:end] for e in expected])).abs().max()) < 1e-12
        assert float((said.features - torch.cat([e[1][first:end] for e in expected])).abs().max()) < 1e-12
    # A tree behind one, a chain behind another: each node as behind its own path alone.
    parents, nodes = [-1, -1, 0, 2], [2, 13, 14, 15]
    more = torch.randn(4, size, dtype=torch.float64, generator=dice)
    tree = Segment(slot=slots[0], tokens=torch.tensor(nodes), parents=np.array(parents), features=more)
    chain = Segment(slot=slots[2], tokens=torch.tensor([7, 7]), features=more[:2])
    said = lm.extend([tree, chain])
    for i in range(4):
        path, node = [i], i
        while (node := parents[node]) >= 0:
            path.insert(0, node)
        logits, _ = recomputed(lm.module, texts[0] + [nodes[n] for n in path], torch.cat([given[0], more[path]]))
        assert float((said.logits[i] - logits[-1]).abs().max()) < 1e-12
    logits, _ = recomputed(lm.module, texts[2] + [7, 7], torch.cat([given[2], more[:2]]))
    assert float((said.logits[4:] - logits[-2:]).abs().max()) < 1e-12
    # What is committed of the tree is what its path is.
    lm.commit({slots[0]: [0, 2, 3], slots[2]: []})
    said = lm.extend([Segment(slot=slots[0], tokens=torch.tensor([9]), features=more[:1])])
    whole = texts[0] + [nodes[n] for n in (0, 2, 3)] + [9]
    logits, _ = recomputed(lm.module, whole, torch.cat([given[0], more[[0, 2, 3]], more[:1]]))
    assert float((said.logits - logits[-1:]).abs().max()) < 1e-12
    assert lm.length(slots[2]) == 7


@torch.inference_mode()
def test_blocks_that_look_both_ways_say_what_recomputation_says() -> None:
    lm, dice = head("block"), torch.Generator().manual_seed(1)
    lengths, sizes = (3, 0, 5), (4, 2, 1)
    given = [torch.randn(n, lm.module.feature_size, dtype=torch.float64, generator=dice) for n in lengths]
    slots = [lm.open() for _ in lengths]
    lm.extend(
        [Segment(slot=s, tokens=torch.zeros(len(f)).long(), features=f) for s, f in zip(slots, given, strict=True)]
    )
    lm.commit({s: range(n) for s, n in zip(slots, lengths, strict=True)})
    blocks = [
        Segment(slot=s, tokens=torch.tensor([9, 0, 0, 0][:size]), sees=sees_all(size))
        for s, size in zip(slots, sizes, strict=True)
    ]
    said = lm.extend(blocks).logits.split(list(sizes))
    for logits, features, size in zip(said, given, sizes, strict=True):
        before = len(features)
        cache = Everything()
        if before:
            seen = torch.ones(before, before).tril().bool()[None, None]
            nothing, places = torch.zeros(1, before).long(), torch.arange(before)[None]
            lm.module(HeadInputs(tokens=nothing, features=features[None], positions=places, mask=seen, cache=cache))
        ids, positions = torch.tensor([[9, 0, 0, 0][:size]]), torch.arange(before, before + size)[None]
        mask = torch.ones(1, 1, size, before + size).bool()
        hidden = lm.module(HeadInputs(tokens=ids, features=None, positions=positions, mask=mask, cache=cache))
        assert float((logits - lm.module.logits(hidden)[0]).abs().max()) < 1e-12
    assert not torch.equal(said[0], lm.extend([Segment(slot=slots[0], tokens=torch.tensor([9, 0, 0, 0]))]).logits)


@torch.inference_mode()
def test_a_copied_slot_goes_on_as_the_original_does() -> None:
    lm, dice = head(), torch.Generator().manual_seed(1)
    given = torch.randn(6, lm.module.feature_size, dtype=torch.float64, generator=dice)
    slot = lm.open()
    lm.extend([Segment(slot=slot, tokens=torch.arange(3, 8), features=given[:5])])
    lm.commit({slot: range(5)})
    copied = lm.copy(slot, 4)
    assert lm.length(copied) == 4
    said = lm.extend([Segment(slot=copied, tokens=torch.tensor([30]), features=given[5:])]).logits
    logits, _ = recomputed(lm.module, [3, 4, 5, 6, 30], torch.cat([given[:4], given[5:]]))
    assert float((said[-1] - logits[-1]).abs().max()) < 1e-12


def test_what_nodes_see_must_fit_them() -> None:
    lm = head("block")
    slot = lm.open()
    with pytest.raises(ValueError, match=r"must be of shape \(2, 2\)"):
        lm.extend([Segment(slot=slot, tokens=torch.tensor([1, 2]), sees=np.ones((2, 3), dtype=bool))])


def test_features_for_some_segments_alone_are_refused() -> None:
    lm = head()
    one, other = lm.open(), lm.open()
    some = torch.zeros(1, lm.module.feature_size, dtype=torch.float64)
    with pytest.raises(ValueError, match="some segments of one forward have features"):
        lm.extend(
            [Segment(slot=one, tokens=torch.tensor([1]), features=some), Segment(slot=other, tokens=torch.tensor([1]))]
        )
