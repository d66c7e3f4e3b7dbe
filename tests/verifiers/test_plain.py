"""A step that drafted nothing: every verifier that carries nothing draws the same token from the root's row."""

import pytest
import torch

from outrider.core.dice import PhiloxDice
from outrider.verifiers.protocol import plain
from tests.world.drafts import chains
from tests.world.verifiers import CARRYING, LOSSLESS, LOSSY, verifier


@pytest.mark.parametrize("name", [name for name in [*LOSSLESS, *LOSSY] if name not in CARRYING])
def test_the_shared_verdict_is_the_verifiers_own(name: str) -> None:
    draft = chains([[], [], []], None)
    rows = torch.rand(3, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows /= rows.sum(-1, keepdim=True)

    def dice() -> PhiloxDice:
        return PhiloxDice(seeds=[5, 6, 7], steps=[0, 1, 2])

    ours, theirs = plain(draft, rows, dice()), verifier(name).verify(draft, rows, dice())
    assert ours.next_tokens.tolist() == theirs.next_tokens.tolist()
    assert ours.num_accepted.tolist() == theirs.num_accepted.tolist() == [0, 0, 0]
    assert ours.paths.shape == theirs.paths.shape == (3, 0)
