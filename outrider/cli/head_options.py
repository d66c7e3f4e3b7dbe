"""The options of the commands that train heads."""

from dataclasses import dataclass

from outrider.inputs import InputError


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
