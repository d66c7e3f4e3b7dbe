"""A server of Outrider in front of a fake of vLLM."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from outrider.serve.limits import Limits
from outrider.serve.settings import HttpSettings
from outrider.serve.vllm.launch import Launch, VllmSpeculation
from outrider.serve.vllm.passing import PassingService, make_passing_app
from outrider.serve.vllm.process import VllmProcess
from outrider.serve.vllm.python import VllmPython
from tests.serve.served import listening
from tests.serve.vllm.fakes import fake_python

DRAFTS = VllmSpeculation(method="draft_model", name="model", model="/a/draft")


@pytest.fixture(scope="session")
def python(tmp_path_factory) -> VllmPython:
    return VllmPython.of(fake_python(tmp_path_factory.mktemp("fake")))


@pytest.fixture(scope="session")
def gpu_python(tmp_path_factory) -> VllmPython:
    """One whose vLLM is not the build for CPUs."""
    return VllmPython.of(fake_python(tmp_path_factory.mktemp("fake"), package="vllm"))


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> Path:
    """Where answers are kept."""
    return tmp_path_factory.mktemp("answers") / "answers.jsonl"


@pytest.fixture(scope="module")
def passing(gpu_python, answers) -> Iterator[str]:
    """The address of a server in front of the fake."""
    launch = Launch(target="/a/target", speculation=DRAFTS, names=("mine",), updates_weights=True)
    settings = HttpSettings(keys=("secret",), admin_key="admin", answers=answers)
    with VllmProcess(gpu_python, launch) as process:
        service = PassingService(process, Limits(max_body_bytes=10_000))
        with listening(make_passing_app(service, settings), service) as url:
            yield url


@pytest.fixture
def client(passing) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=passing, timeout=30, headers={"authorization": "Bearer secret"}) as found:
        yield found
