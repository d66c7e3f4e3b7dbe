"""The options of the commands that train heads which guess all draft tokens at once, each without the others."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BlockwiseOptions:
    """What blockwise heads can be told. There are as many heads as --depth says.

    Attributes:
        intermediate_size: Width of each head between its two matrices. By default the target's width.
        one_head: Learn one drawn head in each step, which needs less memory and time.
        ngram_order: Most tokens of an n-gram. An n-gram model is counted on --data and written beside the heads; 0
            counts none.
        ngram_least: How often an n-gram must be seen to be kept.
        tree_nodes: Draft nodes of the tree that is found from the heads' accuracies.
    """

    intermediate_size: int | None = None
    one_head: bool = False
    ngram_order: int = 3
    ngram_least: int = 2
    tree_nodes: int = 24


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """What a parallel head can be told. With --begin, the sizes are those of the head that is trained on.

    Attributes:
        form: What the head reads of a text: the target's last state beside the next token (eagle), or the state alone
            (medusa).
        slots: Mask slots; the head drafts one token more. By default one less than --depth.
        layers: Decoder layers.
        num_groups: Most groups of slots of a text in a step, drawn anew each time it comes. By default one behind every
            token.
        noise: Strength of the noise on the target's states.
        intermediate_size: Width of the feed-forward. By default the target's.
    """

    form: str = "eagle"
    slots: int | None = None
    layers: int = 1
    num_groups: int | None = None
    noise: float = 0.0
    intermediate_size: int | None = None
