r"""P-EAGLE: an EAGLE-3 head that guesses all tokens of a draft in one forward; its files in every layout."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from outrider.core.types import InputError
from outrider.heads.checkpoint import KIND as OURS
from outrider.heads.checkpoint import MOST_COUNT, size
from outrider.heads.eagle3 import Eagle3Head
from outrider.heads.eagle3_files import MASK, SPECULATORS, Answers, Eagle3File
from outrider.lm.head import KVCache
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead

KIND = "peagle"
"""Its `speculators_model_type`."""
MASK_IDS = ("mask_token_id", "pard_token")
"""The keys of a config that name the mask token: that of trainers, and vLLM's own."""


class PEagleHead(Eagle3Head):
    r"""An EAGLE-3 head with mask slots behind its pairs. Every slot reads the embedding of the mask token. Its feature
    is made by `fuse` from $m$, which stands for the unknown states and is normed as real ones are. A negative token
    stands for a slot.

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
        cache: KVCache,
    ) -> Float[Tensor, "rows width hidden"]:
        slots = tokens < 0
        given = torch.where(slots[..., None], self.fuse(self.mask_hidden), features)
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
    def of(
        cls, path: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor], *, mask_id: int | None = None
    ) -> "PEagleFile":
        """A checkpoint by its two files.

        Args:
            mask_id: The mask token, where the config does not say it.

        Raises:
            InputError: The mask token or its states are missing.
        """
        key = next((name for name in MASK_IDS if config.get(name) is not None), MASK_IDS[0])
        if config.get(key) is None and mask_id is None:
            raise InputError(
                f"the config of the P-EAGLE head in {path} does not say which token stands for an unknown one; say it "
                f"with {MASK_IDS[0]}=..."
            )
        kept = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        hidden = kept.pop(MASK, None)
        if hidden is None or hidden.dim() != 3 or not hidden.is_floating_point():
            raise InputError(f"the weights of the P-EAGLE head in {path} have no {MASK} of three dimensions")
        if config.get("speculators_model_type") == KIND:
            config = {**config, "speculators_model_type": SPECULATORS}
        return cls(
            eagle3=Eagle3File.of(path, config, kept),
            mask_id=size(config, key, path, default=mask_id, least=0),
            mask_hidden=hidden,
            num_slots=_num_slots(config, path),
        )

    def head(
        self, ends: EmbeddingAndHead, *, num_layers: int, vocab_size: int, answers: Answers | None = None
    ) -> PEagleHead:
        """The head, as `Eagle3File.head` makes it. Raises InputError if the tensors are not those of such a head, or a
        question is open.
        """
        inner = self.eagle3.head(ends, num_layers=num_layers, vocab_size=vocab_size, answers=answers or Answers())
        fits = tuple(self.mask_hidden.shape) == (1, 1, inner.fc.in_features)
        if not fits or self.mask_id >= int(self.eagle3.layer.vocab_size):
            raise InputError(f"mask_hidden or mask_token_id of the P-EAGLE head in {self.eagle3.path} does not fit it")
        return PEagleHead(inner, self.mask_id, self.mask_hidden)


def is_peagle(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether a checkpoint is one of P-EAGLE."""
    if OURS in config:
        return False
    return config.get("speculators_model_type") == KIND or any(name.removeprefix("model.") == MASK for name in names)


def _num_slots(config: Mapping[str, Any], path: str) -> int | None:
    """One slot less than the draft has tokens, because the last pair guesses the first; None if no config says it."""
    try:
        method = config["speculators_config"]["proposal_methods"][0]
        method["speculative_tokens"]
    except (KeyError, IndexError, TypeError):
        return None
    return size(method, "speculative_tokens", path, most=MOST_COUNT) - 1
