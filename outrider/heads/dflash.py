r"""DFlash: a trunk that guesses a whole block of tokens in one forward, from the target's hidden states.

DFlash 2026, https://arxiv.org/abs/2602.06036
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from outrider.core.types import InputError
from outrider.heads.parts.layers import Attention, GatedMLP, Rotary
from outrider.lm.forwards.head_package import Kind
from outrider.lm.head import KVCache
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead

Method = Literal["dflash", "dflare", "dspark"]
"""The heads that share this trunk."""
Confidence = Literal["markov", "trunk"]
"""What a confidence head reads."""


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What the positions of a block see in one layer. They see all of the context, unless it has a window.

    Attributes:
        window: They see positions closer than this; None: at any distance.
        causal: Whether they see no later position of the block.
    """

    window: int | None = None
    causal: bool = False


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """The sizes of a head that guesses blocks.

    Attributes:
        method: Which head it is.
        layers: The decoder layers, as a config of Qwen 3 describes them.
        block_size: Positions of a block, the anchor's included.
        mask_id: The token that stands for an unknown token.
        taps: The target's hidden states that it reads, in the order in which they stand side by side.
        target_size: Width of the target's hidden states.
        from_anchor: Whether the anchor's position guesses the first token; otherwise the first mask's position does.
        sights: What each layer sees; empty: everything.
        embedding_scale: Factor of the input embeddings.
        num_embeddings: Rows of its own input embedding; None: it uses the target's.
        num_outputs: Tokens of its own output layer; None: it uses the target's.
        listed: Whether its own output layer has a list of the tokens that it can guess.
        apart: Whether the context has key and value projections of its own (DFlare).
        markov: The kind of sequential head (DSpark): `vanilla`, `gated` or `rnn`.
        markov_rank: Its width.
        confidence: What its confidence head reads beside the trunk's output: `markov`, the tokens before as the
            sequential head does, or `trunk`, nothing; None: it has none.

    Raises:
        InputError: A size makes no sense.
    """

    method: Method
    layers: PreTrainedConfig
    block_size: int
    mask_id: int
    taps: tuple[int, ...]
    target_size: int
    from_anchor: bool = False
    sights: tuple[Sight, ...] = ()
    embedding_scale: float = 1.0
    num_embeddings: int | None = None
    num_outputs: int | None = None
    listed: bool = False
    apart: bool = False
    markov: str = "vanilla"
    markov_rank: int = 0
    confidence: Confidence | None = None

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise InputError(f"block_size must be >= 2, the anchor and one mask at least, got {self.block_size}")
        if not self.taps or len(set(self.taps)) < len(self.taps) or min(self.taps) < 0:
            raise InputError(f"taps must be one or more different hidden states, got {list(self.taps)}")
        if self.layers.num_hidden_layers < 1:
            raise InputError(f"the head must have a layer, got {self.layers.num_hidden_layers}")

    @property
    def max_depth(self) -> int:
        """How many tokens a block guesses."""
        return self.block_size if self.from_anchor else self.block_size - 1

    @property
    def first(self) -> int:
        """The position of a block that guesses the first token."""
        return 0 if self.from_anchor else 1


def spread_taps(num_layers: int, count: int) -> tuple[int, ...]:
    r"""Hidden states at even distances: the outputs of layers $1 + i (L - 4) / (n - 1)$, rounded. Fewer where these
    are the same.

    Tap k enters layer k, so the output of layer k is tap k + 1.

    Example:
        >>> spread_taps(36, 5), spread_taps(36, 9), spread_taps(2, 5)
        ((2, 10, 18, 26, 34), (2, 6, 10, 14, 18, 22, 26, 30, 34), (1,))
    """
    places = [1 + i * (num_layers - 4) / max(1, count - 1) for i in range(count)] if count > 1 else [num_layers / 2]
    return tuple(sorted({min(max(1, round(place) + 1), max(1, num_layers - 1)) for place in places}))


class BlockAttention(Attention):
    """Attention of the positions of a block to each other and to the context.

    The keys and values of a context position are made of the target's features there.

    Args:
        apart: Whether the context has projections of its own.
    """

    def __init__(self, config: PreTrainedConfig, layer: int, *, apart: bool = False) -> None:
        super().__init__(config, layer, normed=True)
        self.apart = apart
        if apart:
            bias = self.k_proj.bias is not None
            self.k_proj_target = nn.Linear(config.hidden_size, self.k_proj.out_features, bias=bias)
            self.v_proj_target = nn.Linear(config.hidden_size, self.v_proj.out_features, bias=bias)

    def remember(
        self, context: Float[Tensor, "rows width hidden"], rotary: Float[Tensor, "2 rows width dim"], cache: KVCache
    ) -> None:
        """Store keys and values of context positions."""
        to_keys, to_values = (self.k_proj_target, self.v_proj_target) if self.apart else (self.k_proj, self.v_proj)
        keys = self._heads(to_keys(context), self.k_norm)
        keys, _ = apply_rotary_pos_emb(keys, keys, rotary[0], rotary[1])
        cache.update(keys, self._heads(to_values(context)), self.layer)


class BlockLayer(nn.Module):
    """A decoder layer of Qwen 3 over the positions of a block."""

    def __init__(self, config: PreTrainedConfig, layer: int, *, apart: bool = False) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = BlockAttention(config, layer, apart=apart)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)

    def forward(
        self,
        states: Float[Tensor, "rows width hidden"],
        rotary: Float[Tensor, "2 rows width dim"],
        mask: Bool[Tensor, "rows 1 width keys"],
        cache: KVCache,
    ) -> Float[Tensor, "rows width hidden"]:
        states = states + self.self_attn(self.input_layernorm(states), rotary, mask, cache)
        return states + self.mlp(self.post_attention_layernorm(states))


class DFlash(nn.Module):
    r"""A head that reads a block of the anchor and masks, and sees the target's features of all positions before it.

    With the tapped states $o_1 \ldots o_n$ of a position side by side, its feature is
    $c = \mathrm{RMSNorm}(W_{fc} [o_1; \ldots; o_n])$. Every layer makes its keys and values of $c$ with the
    projections that it also has for the block. The features do not pass through the layers. The target's embedding and
    output layer are used, unless the checkpoint has its own.

    A target's embedding counts without the factor by which some targets scale it. Its output layer counts with scales
    and caps.

    Attributes:
        feature_size: Width of the tapped states side by side.
        vocab_size: Width of the logits.

    Args:
        config: The sizes.
        ends: The target's ends.
        vocab_size: Width of the target's logits.

    References:
        DFlash 2026. https://arxiv.org/abs/2602.06036
    """

    method: ClassVar[Method] = "dflash"
    kinds: ClassVar[Sequence[Kind]] = (Kind(logits=False), Kind(features=False))

    def __init__(self, config: BlockConfig, ends: EmbeddingAndHead, vocab_size: int) -> None:
        super().__init__()
        size, eps = config.layers.hidden_size, config.layers.rms_norm_eps
        self.config, self.ends = config, ends
        self.feature_size = len(config.taps) * config.target_size
        self.vocab_size = vocab_size if config.num_outputs is None else config.num_outputs
        if not config.listed:
            self.vocab_size = min(self.vocab_size, vocab_size)
        count = config.layers.num_hidden_layers
        self.layers = nn.ModuleList(BlockLayer(config.layers, i, apart=config.apart) for i in range(count))
        self.norm = nn.RMSNorm(size, eps=eps)
        self.rotary = Rotary(config.layers)
        if config.num_embeddings is not None:
            self.embed_tokens = nn.Embedding(config.num_embeddings, size)
        if config.num_outputs is not None:
            self.lm_head = nn.Linear(size, config.num_outputs, bias=False)
        if config.listed:
            self.register_buffer("d2t", torch.zeros(config.num_outputs or 0, dtype=torch.long))
        self._fuse(size, eps)

    def extra_repr(self) -> str:
        """The choices that no tensor shows."""
        names = ("block_size", "mask_id", "taps", "from_anchor", "sights", "embedding_scale", "markov")
        return ", ".join(f"{name}={getattr(self.config, name)}" for name in names)

    def forward(
        self,
        tokens: Int[Tensor, "rows width"],
        features: Float[Tensor, "rows width dim"] | None,
        positions: Int[Tensor, "rows width"],
        mask: Bool[Tensor, "rows 1 width keys"],
        cache: KVCache,
    ) -> Float[Tensor, "rows width hidden"]:
        """Features of context positions are remembered, whatever the tokens there. Without features, the nodes are a
        block: its output features are those below the output layer.
        """
        if features is None:
            return self.block(tokens, positions, mask, cache)
        contexts = self.contexts(features)
        rotary = self.rotary(contexts[0], positions)
        for layer, context in zip(self._layers(), contexts, strict=True):
            layer.self_attn.remember(context, rotary, cache)
        return contexts[-1]

    def block(
        self,
        tokens: Int[Tensor, "rows width"],
        positions: Int[Tensor, "rows width"],
        mask: Bool[Tensor, "rows 1 width keys"],
        cache: KVCache,
        places: Int[Tensor, "rows keys"] | None = None,
    ) -> Float[Tensor, "rows width hidden"]:
        """Output features of blocks.

        Args:
            places: Position of each key; None: keys stand in the order of their positions, without gaps.
        """
        states = self.embed(tokens)
        rotary = self.rotary(states, positions)
        for i, layer in enumerate(self._layers()):
            seen = mask
            if self.config.sights and self.config.sights[i] != Sight():
                keys = torch.arange(mask.shape[-1], device=mask.device)[None] if places is None else places
                seen = mask & _within(self.config.sights[i], positions, keys)[:, None]
            states = layer(states, rotary, seen, cache)
        return self.norm(states)

    def contexts(self, features: Float[Tensor, "*batch dim"]) -> list[Float[Tensor, "*batch hidden"]]:
        """For each layer, what the keys and values of context positions are made of."""
        return [self.hidden_norm(self.fc(features))] * len(self.layers)

    def embed(self, tokens: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch hidden"]:
        """Input embeddings in the head's own dtype."""
        table = self.embed_tokens.weight if self.config.num_embeddings is not None else _table(self.ends)
        found = self.ends.embed(tokens) if table is None else embedding(tokens, table)
        return found.to(self.norm.weight.dtype) * self.config.embedding_scale

    def logits(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch vocab"]:
        if self.config.num_outputs is not None:
            return self.lm_head(hidden)
        if not hidden.numel():
            return hidden.new_zeros(*hidden.shape[:-1], self.vocab_size)
        table = _table(self.ends)
        return self.ends.head(hidden if table is None else hidden.to(table.device, table.dtype))

    def informed(
        self, hidden: Float[Tensor, "*batch depth hidden"], before: Int[Tensor, "*batch depth"]
    ) -> Float[Tensor, "*batch depth inner"]:
        """What `informed_logits` reads, where the tokens before each guess are known: in training.

        Args:
            hidden: Output features of the positions that guess, in order.
            before: The token before each guessed one; the anchor first.
        """
        return hidden

    def informed_logits(self, inner: Float[Tensor, "*batch inner"]) -> Float[Tensor, "*batch vocab"]:
        """Logits of guesses whose tokens before them are known."""
        return self.logits(inner)

    def confidence(self, inner: Float[Tensor, "*batch inner"]) -> Float[Tensor, "*batch"] | None:
        """The logits of the probabilities that guesses are accepted, from what `informed_logits` reads; None where it
        estimates none.
        """
        return None

    def _fuse(self, size: int, eps: float) -> None:
        """Make what turns tapped states into features of the context."""
        self.fc = nn.Linear(self.feature_size, size, bias=False)
        self.hidden_norm = nn.RMSNorm(size, eps=eps)

    def _layers(self) -> list[BlockLayer]:
        return [layer for layer in self.layers if isinstance(layer, BlockLayer)]


def _within(
    sight: Sight, queries: Int[Tensor, "rows width"], keys: Int[Tensor, "#rows keys"]
) -> Bool[Tensor, "rows width keys"]:
    """The keys that a layer's sight allows, by their positions."""
    ahead = keys[:, None, :] - queries[:, :, None]
    seen = ahead <= 0 if sight.causal else torch.ones_like(ahead, dtype=torch.bool)
    return seen if sight.window is None else seen & (ahead.abs() < sight.window)


def _table(ends: EmbeddingAndHead) -> Tensor | None:
    """The weights of the target's embedding; None where it has no such table."""
    found = getattr(ends.embed, "weight", None)
    return found if isinstance(found, Tensor) and found.is_floating_point() else None
