"""Fewer draws where the law of the dice is tested, for tests that are about something else."""

import pytest

FEWER = {"PICKS": 2**11, "THROWS": 2**9}


def make_fewer(patch: pytest.MonkeyPatch) -> None:
    """Let the law of the dice be tested with fewer draws, until the patch is undone."""
    for name, count in FEWER.items():
        patch.setattr(f"outrider.proof.draws.{name}", count)
