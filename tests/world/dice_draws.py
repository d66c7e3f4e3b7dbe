"""Fewer draws where the law of the dice is tested, for tests that are about something else."""

from collections.abc import Iterator

import pytest

FEWER = {"PICKS": 2**11, "THROWS": 2**9}


def make_fewer(patch: pytest.MonkeyPatch) -> None:
    """Let the law of the dice be tested with fewer draws, until the patch is undone."""
    for name, count in FEWER.items():
        patch.setattr(f"outrider.proof.draws.{name}", count)


@pytest.fixture(autouse=True, scope="package")
def fewer_draws_in_all() -> Iterator[None]:
    """The same for all tests of a package that imports this."""
    with pytest.MonkeyPatch.context() as patch:
        make_fewer(patch)
        yield
