"""Pythons that have a fake of vLLM."""

import pytest

from outrider.serve.vllm.launch import VllmSpeculation
from outrider.serve.vllm.python import VllmPython
from tests.serve.vllm.fakes import fake_python

DRAFTS = VllmSpeculation(method="draft_model", name="model", model="/a/draft")


@pytest.fixture(scope="session")
def python(tmp_path_factory) -> VllmPython:
    return VllmPython.of(fake_python(tmp_path_factory.mktemp("fake")))


@pytest.fixture(scope="session")
def gpu_python(tmp_path_factory) -> VllmPython:
    """One whose vLLM is not the build for CPUs."""
    return VllmPython.of(fake_python(tmp_path_factory.mktemp("fake"), package="vllm"))
