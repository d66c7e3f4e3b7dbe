"""States of a target that vLLM has written, by its speculative method `extract_hidden_states`.

Read in vLLM 0.32, `ExampleHiddenStatesConnector`: one file of safetensors per request, with `token_ids` `[tokens]` and
`hidden_states` `[tokens, layers, hidden]`. The layers are those of `eagle_aux_hidden_state_layer_ids`, in that order;
layer k is the residual stream behind k decoder layers, which is tap k. If the output is included, its last token has
no state.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from outrider.core.types import InputError
from outrider.learning.batch import Document
from outrider.training.data.batches import CapturedStates
from outrider.training.data.capture import capture
from outrider.training.data.shards import Contents

_NEAR = 0.05
"""Largest difference of the states of one document, as a share of their size: kernels round differently."""


@dataclass(frozen=True, kw_only=True)
class VllmStates:
    """States of the target by the number of the document.

    Attributes:
        files: For each document, its file.
        layers: The layers of the files, in their order.
    """

    files: Sequence[Path]
    layers: Sequence[int]

    @classmethod
    def open(
        cls, folder: Path, *, layers: Sequence[int], wanted: Sequence[int], documents: Sequence[Document]
    ) -> "VllmStates":
        """The states in a folder, along these documents.

        Args:
            layers: What vLLM was told to extract.
            wanted: The taps that are needed.

        Raises:
            InputError: A file cannot be read or has other layers, a tap was not extracted, or a document has no file.
        """
        if missing := sorted(set(wanted) - set(layers)):
            raise InputError(
                f"training reads the hidden states {sorted(wanted)}, and states_layers has no {missing[0]}; let vLLM "
                "extract these layers (eagle_aux_hidden_state_layer_ids), and name them all in its order"
            )
        by_tokens = {_key(_tokens(path)): path for path in sorted(folder.glob("*.safetensors"))}
        if not by_tokens:
            raise InputError(f"{folder} has no files of hidden states (*.safetensors, one per request of vLLM)")
        files = [by_tokens.get(_key(each.tokens)) or by_tokens.get(_key(each.tokens[:-1])) for each in documents]
        there = [path for path in files if path is not None]
        if len(there) < len(files):
            raise InputError(
                f"{len(files) - len(there)} of {len(files)} documents have no states in {folder}, the first of them "
                f"number {files.index(None)}; send vLLM the token ids of all documents"
            )
        states = cls(files=there, layers=tuple(layers))
        states.states(0)
        return states

    def check(self, model: PreTrainedModel, documents: Sequence[Document]) -> None:
        """Raise InputError if the first document's states are not those of a target."""
        ours = capture(model, documents[:1], Contents(taps=tuple(sorted(self.layers)))).states(0).hidden
        theirs = self.states(0).hidden
        for tap, states in ours.items():
            count = min(len(states), len(theirs[tap]))
            one, other = states[:count].double(), theirs[tap][:count].double()
            difference = float((one - other).norm() / one.norm())
            if not difference <= _NEAR:
                raise InputError(
                    f"the states of layer {tap} in {self.files[0]} differ by {difference:.0%} from this target's; they "
                    "are of another target, or states_layers has another order than vLLM was told"
                )

    def states(self, number: int, first: int = 0, last: int | None = None) -> CapturedStates:
        """The states of tokens `first` to before `last` of a document."""
        try:
            with safe_open(self.files[number], framework="pt") as file:
                rows: Float[Tensor, "length layers hidden"] = file.get_slice("hidden_states")[first:last]
        except (OSError, SafetensorError) as error:
            raise InputError(f"{self.files[number]} is damaged; let vLLM write it again") from error
        if rows.dim() != 3 or rows.shape[1] != len(self.layers):
            raise InputError(
                f"{self.files[number]} has states of shape {list(rows.shape)}, and states_layers names "
                f"{len(self.layers)} layers; name the layers that vLLM was told to extract"
            )
        hidden: Mapping[int, Tensor] = {tap: rows[:, place] for place, tap in enumerate(self.layers)}
        return CapturedStates(hidden=hidden)


def _key(tokens: Int[np.ndarray, " length"]) -> bytes:
    return tokens.astype(np.int64).tobytes()


def _tokens(path: Path) -> Int[np.ndarray, " length"]:
    """The token ids of a file."""
    try:
        with safe_open(path, framework="pt") as file:
            token_ids: Any = file.get_tensor("token_ids")
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} is no file of hidden states of vLLM, or is damaged") from error
    return token_ids.to(torch.long).numpy()
