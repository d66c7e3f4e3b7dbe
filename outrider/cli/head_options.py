"""The options of the commands that train heads."""

from dataclasses import dataclass

from outrider.core.inputs import InputError


@dataclass(frozen=True, kw_only=True)
class HeadOptions:
    """What every trained head can be told.

    Attributes:
        begin: A head of this kind to train further: a directory or a hub id. Its sizes stay.
        divergence: The loss: fkl, rkl, jsd:beta=0.5, tvd, nla, lk; ce learns the texts and not the target's rows.
        decay: The weight of each draft token in the loss, as a share of the weight of the token before it. By default
            0.8.
        draft_vocab: How many tokens the head can guess: the most frequent learnt tokens of --data. By default all.
        regenerate: Learn on the target's answers to the prompts of --data, not on its texts.
        held_out: Texts to watch, best written by the target; may be given several times. By default a twentieth of
            --data.
        depth: Draft tokens per step whose acceptance is watched.
        watch_temperature: Keep the head with the best block efficiency at this temperature, 1 or 0.
        split: The split of a dataset.
        subset: The configuration of a dataset, also called subset.
        capture: Capture the target's hidden states along --data once, in the folder of the run, and read them in every
            epoch. That pays where texts come more than once.
        slot_balanced: Let every draft token have the same total weight before --decay or --gamma, however many places
            of the texts it has. Texts are short of places for deep draft tokens.
        limit: Read only this many documents.
    """

    begin: str | None = None
    divergence: str = "fkl"
    decay: float = 0.8
    draft_vocab: int | None = None
    regenerate: bool = False
    held_out: tuple[str, ...] = ()
    depth: int = 5
    watch_temperature: int = 1
    split: str = "train"
    subset: str | None = None
    limit: int | None = None
    capture: bool = False
    slot_balanced: bool = False

    def __post_init__(self) -> None:
        if self.watch_temperature not in (0, 1):
            raise InputError(f"watch_temperature must be 1 or 0, got {self.watch_temperature}")


@dataclass(frozen=True, kw_only=True)
class MedusaOptions:
    """What Medusa heads can be told. There are as many heads as --depth says.

    Attributes:
        layers: Residual layers of each head.
        shared: Use one copy of the target's output layer for all heads, which does not learn. Otherwise each head has
            one of its own, with as many weights as the target's.
        tree_nodes: Draft nodes of the tree that is found from the heads' accuracies.
    """

    layers: int = 1
    shared: bool = False
    tree_nodes: int = 24


@dataclass(frozen=True, kw_only=True)
class EagleOptions:
    """What an EAGLE-1 head can be told.

    Attributes:
        unrolled: How many draft tokens are learnt from the head's own features; 1 learns from the target's alone.
        regression: Weight of the distance between the head's features and the target's; the divergence has weight 1.
        noise: Strength of the noise on the target's features.
        bias: Give the fusion a bias, as the authors do. vLLM reads no such checkpoint.
        intermediate_size: Width of the feed-forward. By default the target's.
    """

    unrolled: int = 1
    regression: float = 10.0
    noise: float = 0.2
    bias: bool = False
    intermediate_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class Eagle3Options:
    """What an EAGLE-3 head can be told.

    Attributes:
        unrolled: How many draft tokens are learnt, all but the first from the head's own features.
        taps: The target's hidden states that the head reads, such as 2x16x29; tap k enters layer k. By default a low, a
            middle and a high one.
        fc_norm: Norm each of these states.
        norm_output: Take the normed output as the next feature.
        norm_before_residual: Take the normed feature as the residual.
        intermediate_size: Width of the feed-forward. By default the target's.
    """

    unrolled: int = 7
    taps: str | None = None
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    intermediate_size: int | None = None

    def numbers(self) -> tuple[int, ...] | None:
        """The taps as numbers; None: none were given. Raises InputError for another text."""
        return taps_of(self.taps)


def taps_of(text: str | None) -> tuple[int, ...] | None:
    """Taps as numbers; None: none were given. Raises InputError for another text.

    Example:
        >>> taps_of("2x16x29")
        (2, 16, 29)
    """
    if text is None:
        return None
    if not all(tap.isdecimal() for tap in text.split("x")):
        raise InputError(f"taps must be numbers with x between them, such as 2x16x29, got {text!r}")
    return tuple(int(tap) for tap in text.split("x"))
