"""The heads of the recipe `heads`: how a new one of each is made for a target, and the trees that fit its guesses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

from outrider.training.eagle import eagle3_learner, eagle_learner
from outrider.training.griffin import griffin_learner
from outrider.training.jakiro import jakiro_learner
from outrider.training.parallel import parallel_learner
from outrider.training.poss import poss_learner
from transformers import PreTrainedModel

from outrider.core.types import InputError
from outrider.embedded import EMBEDDED_DRAFT
from outrider.heads.dflash import Method
from outrider.learning.block_loss import BlockLoss, usual_gamma
from outrider.learning.divergences import divergence
from outrider.learning.learner import Learner
from outrider.lm.hf.anatomy import Anatomy
from outrider.lm.hf.open import open_tokenizer
from outrider.training.blocks import BlockLearner
from outrider.training.blockwise import blockwise_learner
from outrider.training.fresh_block import Shape, fresh_head
from outrider.training.medusa import medusa_learner
from recipes.trained import DEPTH

LOSS = "fkl"
"""The divergence that all heads learn by."""
NOISE = 0.2
"""Noise on the features of EAGLE, as the authors have it."""
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


@runtime_checkable
class Tapping(Protocol):
    """A learner that reads hidden states of the target."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Which ones."""
        ...


@dataclass(frozen=True, kw_only=True)
class Head:
    """A head of the comparison.

    Attributes:
        name: Its name in tables, and on the command line.
        drafter: Its name in the catalog.
        make: A fresh learner for a target, by seed.
        trees: Trees beside the chain.
        options: Further options of the drafter, with a comma before each.
        weights_of: The head whose weights it drafts with; None has its own.
    """

    name: str
    drafter: str
    make: Callable[[PreTrainedModel, int], Learner]
    trees: tuple[Shaped, ...]
    options: str = ""
    weights_of: str | None = None

    def spec(self, place: object) -> str:
        """The drafter with the weights of a folder, as the catalog writes it."""
        return f"{self.drafter}:path={place}{self.options}"

    def drafts(self, costly: bool) -> tuple[Shaped, ...]:
        """The chain and the trees; more of them for a costly target."""
        return (CHAINS, *self.trees, *(LARGER.get(self.trees, ()) if costly else ()))


def _medusa(target: PreTrainedModel, seed: int) -> Learner:
    return medusa_learner(target, loss=divergence(LOSS), num_heads=DEPTH, seed=seed)


def _eagle(target: PreTrainedModel, seed: int, *, unrolled: int) -> Learner:
    return eagle_learner(target, loss=divergence(LOSS), unrolled=unrolled, noise=NOISE, seed=seed)


def _eagle3(target: PreTrainedModel, seed: int) -> Learner:
    return eagle3_learner(target, loss=divergence(LOSS), unrolled=DEPTH, seed=seed)


def _blockwise(target: PreTrainedModel, seed: int) -> Learner:
    return blockwise_learner(target, loss=divergence(LOSS), num_heads=DEPTH, seed=seed)


def _poss(target: PreTrainedModel, seed: int) -> Learner:
    return poss_learner(target, loss=divergence(LOSS), stride=2, unrolled=DEPTH, noise=NOISE, seed=seed)


def _griffin(target: PreTrainedModel, seed: int) -> Learner:
    return griffin_learner(target, loss=divergence(LOSS), unrolled=DEPTH, noise=NOISE, seed=seed)


def _jakiro(target: PreTrainedModel, seed: int) -> Learner:
    return jakiro_learner(target, loss=divergence(LOSS), noise=NOISE, seed=seed)


def _parallel(target: PreTrainedModel, seed: int) -> Learner:
    return parallel_learner(target, loss=divergence(LOSS), num_slots=DEPTH - 1, seed=seed)


def _block(target: PreTrainedModel, seed: int, *, method: Method) -> Learner:
    shape = Shape(method=method, layers=BLOCK_LAYERS)
    head = fresh_head(target, open_tokenizer(target.name_or_path), shape, seed=seed)
    loss = BlockLoss(of=divergence(LOSS), gamma=usual_gamma(head.config.block_size))
    return BlockLearner(head.train(), target, loss=loss, seed=seed)


HEADS = (
    Head(name="blockwise raw", drafter="blockwise", make=_blockwise, trees=OF_MARGINALS),
    Head(
        name="blockwise",
        drafter="blockwise",
        make=_blockwise,
        trees=(),
        options=f",rescorer={EMBEDDED_DRAFT}",
        weights_of="blockwise raw",
    ),
    Head(name="medusa", drafter="medusa", make=_medusa, trees=OF_MARGINALS),
    Head(name="eagle", drafter="eagle", make=partial(_eagle, unrolled=1), trees=OF_FEATURES),
    Head(name="hass", drafter="eagle", make=partial(_eagle, unrolled=DEPTH), trees=OF_FEATURES),
    Head(name="eagle3", drafter="eagle3", make=_eagle3, trees=OF_FEATURES),
    Head(name="poss", drafter="poss", make=_poss, trees=OF_FEATURES),
    Head(name="griffin", drafter="griffin", make=_griffin, trees=OF_FEATURES),
    Head(name="jakiro", drafter="jakiro", make=_jakiro, trees=OF_FEATURES),
    Head(name="parallel", drafter="parallel", make=_parallel, trees=OF_MARGINALS),
    Head(name="dflash", drafter="dflash", make=partial(_block, method="dflash"), trees=OF_MARGINALS),
    Head(name="dflare", drafter="dflare", make=partial(_block, method="dflare"), trees=OF_MARGINALS),
    Head(name="dspark", drafter="dspark", make=partial(_block, method="dspark"), trees=OF_FEATURES),
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
        found.update(taps_of(head.make(target, 0)))
    return tuple(sorted(found))


def taps_of(learner: Learner) -> tuple[int, ...]:
    """The hidden states that a learner reads."""
    if not isinstance(learner, Tapping):
        raise TypeError(f"{type(learner).__name__} does not say which hidden states it reads")
    return learner.taps
