r"""P-EAGLE in the layout of `speculators`: an EAGLE-3 head that guesses all tokens of a draft in one forward."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from outrider.heads.eagle3 import Eagle3Head
from outrider.heads.eagle3_files import SPECULATORS, Answers, Eagle3File
from outrider.lm.ends import Ends
from outrider.lm.head import Keeper
from outrider.types import InputError

KIND = "peagle"
"""Its `speculators_model_type`."""


class PEagleHead(Eagle3Head):
    r"""An EAGLE-3 head with mask slots behind its pairs. Every slot reads the embedding of the mask token, and
    $W_{fc} m$ as its feature, where $m$ stands for the unknown states. A negative token stands for a slot.

    Args:
        head: The EAGLE-3 head, whose tensors it takes.
        mask_id: The mask token.
        mask_hidden: $m$.

    References:
        P-EAGLE 2026. https://arxiv.org/abs/2602.01469
    """

    def __init__(self, head: Eagle3Head, mask_id: int, mask_hidden: Float[Tensor, "1 1 all"]) -> None:
        super().__init__(head.sizes, head.ends, head.ids)
        self.load_state_dict(head.state_dict(), assign=True)
        self.vocab_size, self.mask_id = head.vocab_size, mask_id
        self.mask_hidden = nn.Parameter(mask_hidden.to(head.fc.weight))

    def extra_repr(self) -> str:
        """The choices that no tensor shows."""
        return f"{super().extra_repr()}, mask_id={self.mask_id}"

    def forward(
        self,
        tokens: Int[Tensor, "rows width"],
        features: Float[Tensor, "rows width dim"],
        positions: Int[Tensor, "rows width"],
        mask: Bool[Tensor, "rows 1 width keys"],
        cache: Keeper,
    ) -> Float[Tensor, "rows width hidden"]:
        slots = tokens < 0
        given = torch.where(slots[..., None], self.fc(self.mask_hidden), features)
        return super().forward(torch.where(slots, self.mask_id, tokens), given, positions, mask, cache)


@dataclass(frozen=True, kw_only=True)
class PEagleFile:
    """A checkpoint of P-EAGLE before it is bound to a target.

    Attributes:
        eagle3: The EAGLE-3 head in it.
        mask_id: The mask token.
        mask_hidden: The states of mask slots.
        num_slots: Mask slots that it was trained to draft with; None: the config does not say it.
    """

    eagle3: Eagle3File
    mask_id: int
    mask_hidden: Float[Tensor, "1 1 all"]
    num_slots: int | None

    @classmethod
    def of(cls, path: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> "PEagleFile":
        """A checkpoint by its two files.

        Raises:
            InputError: The mask token or its states are missing, or the tapped states are normed: no source says
                whether the mask slots' states are normed too.
        """
        mask_id, hidden = config.get("mask_token_id"), tensors.get("mask_hidden")
        if type(mask_id) is not int or mask_id < 0:
            raise InputError(f"the config of the P-EAGLE head in {path} must give mask_token_id")
        if hidden is None or hidden.dim() != 3:
            raise InputError(f"the weights of the P-EAGLE head in {path} have no mask_hidden")
        if any(name.startswith(("fc_norm.", "input_norm.")) for name in tensors):
            raise InputError(
                f"the P-EAGLE head in {path} norms the target's states, and whether its mask slots are normed too is "
                "not known, so it is not loaded"
            )
        kept = {name: tensor for name, tensor in tensors.items() if name != "mask_hidden"}
        return cls(
            eagle3=Eagle3File.of(path, {**config, "speculators_model_type": SPECULATORS}, kept),
            mask_id=mask_id,
            mask_hidden=hidden,
            num_slots=_num_slots(config),
        )

    def head(self, ends: Ends, *, num_layers: int, vocab_size: int) -> PEagleHead:
        """The head. Raises InputError if the tensors are not those of such a head, or a question is open."""
        inner = self.eagle3.head(ends, num_layers=num_layers, vocab_size=vocab_size, answers=Answers())
        if self.mask_hidden.shape[-1] != inner.fc.in_features or self.mask_id >= int(self.eagle3.layer.vocab_size):
            raise InputError(f"mask_hidden or mask_token_id of the P-EAGLE head in {self.eagle3.path} does not fit it")
        return PEagleHead(inner, self.mask_id, self.mask_hidden)


def is_peagle(config: Mapping[str, Any]) -> bool:
    """Whether a config is that of P-EAGLE."""
    return config.get("speculators_model_type") == KIND


def _num_slots(config: Mapping[str, Any]) -> int | None:
    """One slot less than the draft has tokens, because the last pair guesses the first."""
    try:
        return int(config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]) - 1
    except (KeyError, IndexError, TypeError, ValueError):
        return None
