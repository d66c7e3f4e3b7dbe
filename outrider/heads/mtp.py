"""A target's own multi-token-prediction layer as a head: transformers' module behind the slots of `HeadLM`.

DeepSeek-AI 2024, DeepSeek-V3, section 2.2. https://arxiv.org/abs/2412.19437
"""

from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from outrider.lm.head import KVCache
from outrider.lm.hf.anatomy import Span
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead


class MtpHead(nn.Module):
    r"""Layer k of a target's `MtpModel`: it reads the token at a position and a feature of the position before.

    With the target's normed last hidden state $h_p$ and $f^{-1}_p = h_p$, layer k computes
    $f^k_p = L_k(x_p, f^{k-1}_{p-1})$, with attention to its own keys at earlier positions, and guesses $x_{p+1}$ from
    $f^k_p$ by the target's output layer. Its slot holds positions $k + 1, k + 2, \ldots$ of the text.

    Attributes:
        ends: The target's embedding, final norm and output layer.
        feature_size: Width of the features.
        vocab_size: Width of the logits.
        span: How far its attention looks back.

    Args:
        model: The `MtpModel`.
        number: The number k of the layer.
        ends: The target's ends.
        vocab_size: Width of the target's logits.
    """

    def __init__(self, model: Any, number: int, ends: EmbeddingAndHead, vocab_size: int) -> None:
        super().__init__()
        config = model.config
        self.layer = model.layers[number]
        self.shared_norm = model.shared_post_norm if model.use_shared_post_norm else nn.Identity()
        self.number, self.ends = number, ends
        self.feature_size, self.vocab_size = int(config.hidden_size), vocab_size
        kind = (getattr(config, "layer_types", None) or {number: None})[number]
        self.span = Span(window=config.sliding_window) if kind == "sliding_attention" else Span()
        self._of_rotary = {"layer_type": kind} if model.has_per_layer_rope else {}
        # The tuple keeps torch from registering the target's own module.
        self._rotary = (model.rotary_emb,)

    def fuse(self, states: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch hidden"]:
        """The feature of a position, from the target's hidden state below its final norm."""
        return self.ends.norm(states)

    def next_feature(self, head_output: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch hidden"]:
        """The feature that the layer itself makes of a position, for the next token."""
        return head_output

    def forward(
        self,
        tokens: Int[Tensor, "rows width"],
        features: Float[Tensor, "rows width dim"],
        positions: Int[Tensor, "rows width"],
        mask: Bool[Tensor, "rows 1 width keys"],
        cache: KVCache,
    ) -> Float[Tensor, "rows width hidden"]:
        places = positions + self.number + 1
        embedded = self.ends.embed(tokens).to(features.dtype)
        rotary = None if self._rotary[0] is None else self._rotary[0](embedded, position_ids=places, **self._of_rotary)
        found: Tensor = self.layer(
            embedded,
            features,
            position_embeddings=rotary,
            attention_mask=mask,
            position_ids=places,
            past_key_values=cache,
        )
        return self.shared_norm(found)

    def logits(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch vocab"]:
        weight = next(iter(getattr(self.ends.embed, "parameters", tuple)()), hidden)
        return self.ends.head(hidden.to(weight.device, weight.dtype))[..., : self.vocab_size]
