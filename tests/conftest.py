"""What all tests share: shapes checked at run time, two threads, no network."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from jaxtyping import install_import_hook

import tests.shapes  # noqa: F401 (the hook looks it up)

install_import_hook("outrider", "tests.shapes.checked")

import pytest  # noqa: E402 (the hook must come first)
import torch  # noqa: E402 (the hook must come first)

torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Weights of the tests' own small models are the same in every run and in any order."""
    torch.manual_seed(0)
