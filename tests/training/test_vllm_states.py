"""Hidden states in the files that vLLM writes. The files here stand in for vLLM's; the target made them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from outrider.core.types import InputError
from outrider.learning.batch import Document
from outrider.training.data.batches import Batches
from outrider.training.data.capture import capture
from outrider.training.data.shards import Contents
from outrider.training.data.vllm_states import VllmStates
from tests.world.learners import documents, head_learner
from tests.world.zoo import tiny

LAYERS = (3, 0, 1, 2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One file per document; of every second one the last token has no state, as where vLLM includes the output."""
    kept = capture(tiny("llama").float(), documents(), Contents(taps=tuple(sorted(LAYERS))))
    for number, document in enumerate(documents()):
        hidden = kept.states(number).hidden
        count = len(document.tokens) - number % 2
        states = torch.stack([hidden[layer][:count] for layer in LAYERS], 1)
        ids = torch.from_numpy(document.tokens[:count])
        save_file({"hidden_states": states, "token_ids": ids}, tmp_path / f"cmpl-{number}.safetensors")
    return tmp_path


def test_states_of_vllm_give_the_loss_of_live_ones(folder: Path) -> None:
    target = tiny("llama").float().requires_grad_(False)
    made = head_learner("eagle3", target, loss="fkl")
    states = VllmStates.open(folder, layers=LAYERS, wanted=made.captured_taps, documents=documents())
    states.check(target, documents())
    live, read = (
        Batches(documents(), batch_size=9, max_length=24, seed=0, captured=captured).batch(0)
        for captured in (None, states)
    )
    assert set(read.hidden) == set(LAYERS)
    torch.testing.assert_close(made(read).total, made(live).total)


def test_states_of_another_target_or_in_another_order_are_refused(folder: Path) -> None:
    for model, layers in ((tiny("llama", seed=5).float(), LAYERS), (tiny("llama").float(), (0, 1, 2, 3))):
        states = VllmStates.open(folder, layers=layers, wanted=(3,), documents=documents())
        with pytest.raises(InputError, match=r"differ by \d+% from this target's; they are of another target, or"):
            states.check(model, documents())


@pytest.mark.parametrize(
    ("layers", "wanted", "more", "message"),
    [
        (LAYERS, (3, 4), 0, "states_layers has no 4; let vLLM extract"),
        ((3, 0), (3,), 0, r"has states of shape \[\d+, 4, 32\], and states_layers names 2 layers"),
        (LAYERS, (3,), 1, "1 of 10 documents have no states in .*, the first of them number 9; send vLLM"),
    ],
)
def test_what_is_missing_is_said(
    folder: Path, layers: tuple[int, ...], wanted: tuple[int, ...], more: int, message: str
) -> None:
    texts = [*documents(), *[Document(tokens=np.arange(3, 9), start=1)] * more]
    with pytest.raises(InputError, match=message):
        VllmStates.open(folder, layers=layers, wanted=wanted, documents=texts)


def test_a_folder_without_states_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no files of hidden states"):
        VllmStates.open(tmp_path, layers=(0,), wanted=(0,), documents=documents())
