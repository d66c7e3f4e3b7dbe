"""What all tests share: shapes checked at run time, one thread (models are tiny), no network."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from jaxtyping import install_import_hook

import tests.shapes  # noqa: F401 (the hook looks it up)

install_import_hook("outrider", "tests.shapes.checked")

import torch  # noqa: E402 (the hook must come first)

torch.set_num_threads(1)
