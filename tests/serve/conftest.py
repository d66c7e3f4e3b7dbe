"""The engine and the server that the tests of this room share."""

from collections.abc import Iterator

import httpx
import pytest

import outrider
from tests.serve.served import loaded, serving


@pytest.fixture(scope="session")
def engine() -> outrider.Engine:
    """The engine of the shared server."""
    return loaded()


@pytest.fixture(scope="session")
def url(engine: outrider.Engine) -> Iterator[str]:
    with serving(engine) as found:
        yield found


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as found:
        yield found
