"""The sizes of a head that guesses blocks, and what sees what in it."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from outrider.core.types import InputError


@dataclass(frozen=True, kw_only=True)
class AttentionSpan:
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
        unused_positions: How many positions at the end of a block guess nothing.
        extra: The sizes that one kind of head has alone; None: it has none.

    Raises:
        InputError: A size makes no sense.
    """

    layers: PreTrainedConfig
    block_size: int
    mask_id: int
    taps: tuple[int, ...]
    target_size: int
    from_anchor: bool = False
    sights: tuple[AttentionSpan, ...] = ()
    embedding_scale: float = 1.0
    num_embeddings: int | None = None
    num_outputs: int | None = None
    listed: bool = False
    unused_positions: int = 0
    extra: Any = None

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
        return self.block_size - self.first - self.unused_positions

    @property
    def first(self) -> int:
        """The position of a block that guesses the first token."""
        return 0 if self.from_anchor else 1

    @property
    def causal(self) -> set[bool]:
        """Whether layers are causal: one word for all of them, or both."""
        return {span.causal for span in self.sights or (AttentionSpan(),)}


@dataclass(frozen=True, kw_only=True)
class CheckpointHints:
    """What a user says of a head whose files leave it open.

    Attributes:
        mask_token_id: The token that stands for an unknown token, where the files do not say it.
        sample_from_anchor: Whether the anchor's position guesses the first token, where the files do not say it.
        causal: Whether a position of a block sees no later one of it, where the files do not say it (JetSpec heads: it
            does not).
        shift_label: Of a Domino head, whether position k guesses the token k + 1 behind the anchor, where the files do
            not say it.
    """

    mask_token_id: int | None = None
    sample_from_anchor: bool | None = None
    causal: bool | None = None
    shift_label: bool | None = None
