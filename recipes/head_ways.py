"""The heads of the recipe `heads`: how a new one of each is made for a target, and the trees that fit its guesses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from outrider import catalog
from outrider.core.types import InputError
from outrider.embedded import EMBEDDED_DRAFT
from outrider.heads.objective import HeadContext, HeadObjective
from outrider.lm.hf.anatomy import Anatomy
from outrider.lm.hf.open import open_tokenizer
from recipes.trained import DEPTH

LOSS = "fkl"
"""The divergence that all heads learn by."""
EVEN = {"decay": 1.0}
"""All draft tokens count alike in the losses of EAGLE and its variants."""
BLOCK_LAYERS = 2
"""Layers of heads that guess blocks: a sixth of the target's, as in the papers."""
CHAIN = "chain"


@dataclass(frozen=True, kw_only=True)
class Shaped:
    """A kind of draft, as the catalog writes its tree, and its depth."""

    tree: str
    depth: int = DEPTH

    @property
    def name(self) -> str:
        """Unique among the drafts of a head."""
        return CHAIN if self == CHAINS else f"{self.tree}, depth {self.depth}"


CHAINS = Shaped(tree=CHAIN)
DYNAMIC = Shaped(tree="dynamic:width=4,num_nodes=16")
"""EAGLE-2's tree, as large as a small target has time for."""
LATTICE = Shaped(tree="lattice:num_nodes=16")
"""DDTree's."""
DRAWN = Shaped(tree="gumbel:branching=2x2x1", depth=3)
SMALL_DYNAMIC, SMALL_LATTICE = Shaped(tree="dynamic:width=3,num_nodes=8"), Shaped(tree="lattice:num_nodes=8")
LONG_CHAIN = Shaped(tree=CHAIN, depth=7)
LARGE_DYNAMIC = Shaped(tree="dynamic:width=6,num_nodes=32", depth=6)
LARGE_LATTICE = Shaped(tree="lattice:num_nodes=32")
OF_FEATURES: tuple[Shaped, ...] = (SMALL_DYNAMIC, DYNAMIC, DRAWN)
"""Trees for heads whose rows depend on the drafted tokens."""
OF_MARGINALS: tuple[Shaped, ...] = (SMALL_LATTICE, LATTICE, DRAWN)
"""Trees for heads that have one row for each depth."""
LARGER: dict[tuple[Shaped, ...], tuple[Shaped, ...]] = {
    OF_FEATURES: (LONG_CHAIN, LARGE_DYNAMIC),
    OF_MARGINALS: (LARGE_LATTICE,),
}
"""What is drafted besides for a target whose forwards cost much."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """A head of the comparison.

    Attributes:
        name: Its name in tables, and on the command line.
        drafter: Its name in the catalog.
        trees: Trees beside the chain.
        told: What the head is told in training; the rest is the command's default.
        options: Further options of the drafter, with a comma before each.
        weights_of: The head whose weights it drafts with; None has its own.
    """

    name: str
    drafter: str
    trees: tuple[Shaped, ...]
    told: Mapping[str, Any] = field(default_factory=dict)
    options: str = ""
    weights_of: str | None = None

    def spec(self, place: object) -> str:
        """The drafter with the weights of a folder, as the catalog writes it."""
        return f"{self.drafter}:path={place}{self.options}"

    def make(self, target: PreTrainedModel, seed: int) -> HeadObjective:
        """A fresh head that learns from a target."""
        spec = catalog.rows("drafter")[self.drafter].kind
        tokenizer = open_tokenizer(target.name_or_path) if Path(target.name_or_path).is_dir() else None
        context = HeadContext(target=target, tokenizer=tokenizer, depth=DEPTH, seed=seed)
        found: HeadObjective = spec.learner(spec.options(divergence=LOSS, **self.told), context)
        return found

    def drafts(self, costly: bool) -> tuple[Shaped, ...]:
        """The chain and the trees; more of them for a costly target."""
        return (CHAINS, *self.trees, *(LARGER.get(self.trees, ()) if costly else ()))


HEADS = (
    Head(name="blockwise raw", drafter="blockwise", trees=OF_MARGINALS),
    Head(
        name="blockwise",
        drafter="blockwise",
        trees=(),
        options=f",rescorer={EMBEDDED_DRAFT}",
        weights_of="blockwise raw",
    ),
    Head(name="medusa", drafter="medusa", trees=OF_MARGINALS),
    Head(name="eagle", drafter="eagle", told=EVEN, trees=OF_FEATURES),
    Head(name="hass", drafter="eagle", told={"unrolled": DEPTH, **EVEN}, trees=OF_FEATURES),
    Head(name="eagle3", drafter="eagle3", told={"unrolled": DEPTH}, trees=OF_FEATURES),
    Head(name="poss", drafter="poss", told={"stride": 2, "unrolled": DEPTH, **EVEN}, trees=OF_FEATURES),
    Head(name="griffin", drafter="griffin", told={"unrolled": DEPTH, **EVEN}, trees=OF_FEATURES),
    Head(name="jakiro", drafter="jakiro", told=EVEN, trees=OF_FEATURES),
    Head(name="parallel", drafter="parallel", trees=OF_MARGINALS),
    Head(name="dflash", drafter="dflash", told={"layers": BLOCK_LAYERS}, trees=OF_MARGINALS),
    Head(name="dflare", drafter="dflare", told={"layers": BLOCK_LAYERS}, trees=OF_MARGINALS),
    Head(name="dspark", drafter="dspark", told={"layers": BLOCK_LAYERS}, trees=OF_FEATURES),
)
"""All heads. `hass` is an EAGLE head that learns on its own features. `blockwise` is `blockwise raw` whose guesses the
embedded draft model chooses among."""


def chosen_heads(text: str, heads: Sequence[Head] = HEADS) -> list[Head]:
    """Heads by name, with commas between them. No text takes all.

    Raises:
        InputError: A name is unknown.

    Example:
        >>> [head.name for head in chosen_heads("eagle3, medusa")]
        ['medusa', 'eagle3']
    """
    names = {name.strip() for name in text.split(",")} if text else {head.name for head in heads}
    known = {head.name for head in heads}
    if unknown := sorted(names - known):
        raise InputError(f"unknown head {unknown[0]!r}; known are {', '.join(sorted(known))}")
    return [head for head in heads if head.name in names]


def all_taps(target: PreTrainedModel, heads: Sequence[Head] = HEADS) -> tuple[int, ...]:
    """The hidden states that any of the heads reads, and the last one, from which the target's rows follow."""
    found = {Anatomy.of(target).num_layers}
    for head in heads:
        found.update(head.make(target, 0).taps)
    return tuple(sorted(found))
