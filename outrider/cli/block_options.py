"""The options of the commands that train heads which guess blocks."""

from dataclasses import dataclass

from outrider.core.inputs import InputError


@dataclass(frozen=True, kw_only=True)
class BlockOptions:
    """What a head that guesses blocks can be told. With --begin, the sizes are those of the head that is trained on.

    Attributes:
        layers: Decoder layers; by default 5, and 7 of dflare.
        block_size: Positions of a block, the anchor's included; by default 8, and 7 of dspark. A block guesses one
            token less than it has positions, or with dspark as many.
        taps: The target's hidden states that are read, such as 2x10x18; by default 5, and 9 of dflare, at even
            distances.
        mask_token_id: The token that stands for an unknown one; by default one that texts do not have.
        num_anchors: Most anchors of a text, drawn anew each time it comes. Each has a block of its own.
        gamma: A guess at depth k counts exp(-(k - 1) / gamma); by default 7 for blocks of 16, 5 for 10, 4 for 8.
        weighting: How much a guess counts: decay, by its depth; or survival, by how likely the guesses before it are
            accepted (D-PACE).
        hard: Share of the cross-entropy of the text's own tokens beside the divergence.
    """

    layers: int | None = None
    block_size: int | None = None
    taps: str | None = None
    mask_token_id: int | None = None
    num_anchors: int = 64
    gamma: float | None = None
    weighting: str = "decay"
    hard: float = 0.0

    def __post_init__(self) -> None:
        if self.taps is not None and not all(tap.isdecimal() for tap in self.taps.split("x")):
            raise InputError(f"taps must be numbers with x between them, such as 2x10x18, got {self.taps!r}")

    @property
    def tapped(self) -> tuple[int, ...] | None:
        """The hidden states as numbers; None: those of the default."""
        return None if self.taps is None else tuple(int(tap) for tap in self.taps.split("x"))


@dataclass(frozen=True, kw_only=True)
class MarkovOptions:
    """What the sequential head of dspark can be told.

    Attributes:
        markov: What a guess is corrected by: the token before it (vanilla), gated by the trunk's output (gated), or all
            tokens since the anchor (rnn).
        markov_rank: Width of the sequential head.
        confidence: Train a head that estimates how likely each guess is accepted, for --length confident.
    """

    markov: str = "vanilla"
    markov_rank: int = 256
    confidence: bool = True
