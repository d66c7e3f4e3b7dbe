"""What is measured is checked first; the law of dice has tests of its own."""

from collections.abc import Iterator

import pytest

from tests.world.dice_draws import make_fewer


@pytest.fixture(autouse=True, scope="package")
def _fewer_draws() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        make_fewer(patch)
        yield
