"""Float64 all the way in every test of this folder."""

import pytest


@pytest.fixture(autouse=True)
def exact(float64_stays_float64: None) -> None:
    """Norms and softmaxes too."""
