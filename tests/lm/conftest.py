"""Float64 all the way in every test of this folder, but in files that say `CASTS`: there casts do what they say."""

import pytest


@pytest.fixture(autouse=True)
def exact(request: pytest.FixtureRequest) -> None:
    """Norms and softmaxes too."""
    if not getattr(request.module, "CASTS", False):
        request.getfixturevalue("float64_stays_float64")
