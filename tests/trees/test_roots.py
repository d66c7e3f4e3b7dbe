"""Drafts of nothing but roots are those that the growth loop makes of them."""

from dataclasses import fields

import numpy as np
import pytest
import torch

from outrider.core.dice import PhiloxDice
from outrider.core.types import Request, Running, Sampling
from outrider.drafters.none import NoDrafter
from outrider.lengths.fixed import FixedLength
from outrider.trees.beam import BeamTree
from outrider.trees.chain import ChainTree
from outrider.trees.dynamic import DynamicTree
from outrider.trees.grow import by_level, grow


@pytest.mark.parametrize("tree", [ChainTree(), DynamicTree(), BeamTree()], ids=lambda tree: type(tree).__name__)
@pytest.mark.parametrize("count", [1, 3])
def test_roots_alone_are_packed_as_the_growth_loop_packs_them(tree, count):
    states = [
        Running(
            request=Request(id=str(i), prompt=(i, 7), max_new_tokens=3, sampling=Sampling()),
            tokens=[i, 7 + i],
            slot=i,
            drafter=NoDrafter(),
        )
        for i in range(count)
    ]
    dice, cpu = PhiloxDice(seeds=list(range(count)), steps=[0] * count), torch.device("cpu")
    rooms, samplings = [0] * count, [Sampling()] * count
    fast = grow(NoDrafter(), tree, FixedLength(), states, rooms, dice, cpu)
    slow = by_level(NoDrafter(), tree, FixedLength(), states, np.array(rooms), samplings, dice, cpu)
    for field in fields(fast):
        one, other = getattr(fast, field.name), getattr(slow, field.name)
        if isinstance(other, np.ndarray | torch.Tensor):
            assert one.dtype == other.dtype, field.name
            assert one.tolist() == other.tolist(), field.name
        else:
            assert one == other, field.name
