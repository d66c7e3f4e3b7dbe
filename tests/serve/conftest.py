"""The engine and the server that the tests of this room share."""

from collections.abc import Iterator

import httpx
import pytest

import outrider
from outrider.serve.api.gateway import Gateway
from outrider.serve.run.service import Service
from outrider.serve.settings import HttpSettings
from tests.serve.served import NAME, loaded, serving


@pytest.fixture(scope="session")
def engine() -> outrider.Engine:
    """The engine of the shared server."""
    return loaded()


@pytest.fixture(scope="session")
def url(engine: outrider.Engine) -> Iterator[str]:
    with serving(engine) as found:
        yield found


@pytest.fixture(scope="session")
def gateway() -> Gateway:
    """A gateway of a service that never starts."""
    return Gateway.of(Service(loaded(), names=(NAME,)), HttpSettings())


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as found:
        yield found
