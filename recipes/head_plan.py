"""What the recipe `heads` is told: which texts, how heads are trained, and how they decode."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from transformers import PreTrainedModel

import outrider
from outrider import catalog
from outrider.core.types import InputError
from outrider.embedded import EMBEDDED_DRAFT
from outrider.heads.objective import HeadContext, HeadObjective
from outrider.learning.batch import Document
from outrider.lm.hf.anatomy import Anatomy
from outrider.lm.hf.open import open_tokenizer
from recipes import options
from recipes.questions import Question, questions
from recipes.trained import DEPTH, Budget

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


PromptFiles = Annotated[list[Path], typer.Option(help="Held-out prompts; may be given several times.")]
PromptsOfFile = Annotated[int, typer.Option(min=1, help="Held-out prompts of each file.")]
TimedPrompts = Annotated[int, typer.Option(min=1, help="Prompts of each file to decode.")]
Engine = Annotated[bool, typer.Option("--engine", help="Decode with the heads too, in turns; wants quiet.")]
StandIn = Annotated[bool, typer.Option("--stand-in", help="Decode with the stand-in of 110M parameters.")]
Device = Annotated[str, typer.Option(help="Where the target runs: cpu or cuda. A GPU keeps no hidden states on disk.")]
Compiled = Annotated[bool, typer.Option("--compiled", help="Decode with compiled forwards.")]


@dataclass(frozen=True, kw_only=True)
class Plan(Budget):
    """What is asked for.

    Attributes:
        prompts: Files of held-out prompts.
        num_prompts: Held-out prompts of each file that heads are judged on.
        timed_prompts: Held-out prompts of each file to decode.
        dtype: What target and heads compute in when they decode.
    """

    prompts: PromptFiles  # type: ignore[assignment]
    num_texts: options.NumTexts = 4000
    steps: options.Steps = 1000
    num_prompts: PromptsOfFile = 60
    engine: Engine = False
    stand_in: StandIn = False
    compiled: Compiled = False
    timed_prompts: TimedPrompts = 12
    max_new_tokens: options.MaxNewTokens = 96
    rounds: options.Rounds = 1
    dtype: options.Dtype = "bfloat16"
    device: Device = "cpu"

    def __post_init__(self) -> None:
        if self.device != "cpu" and not torch.cuda.is_available():
            raise InputError(f"--device {self.device} has not been run: it needs a CUDA device, and torch finds none")
        if len({file.stem for file in self.prompts}) < len(self.prompts):
            raise InputError("the files of --prompts must have different names")

    @property
    def decodes(self) -> bool:
        """Whether heads decode too."""
        return self.engine or self.stand_in or self.compiled

    @property
    def place(self) -> Path:
        """Folder of all heads of this budget."""
        return self.own_work / f"heads-{self.num_texts}x{self.length}-{self.steps}x{self.batch_size}"

    def trained(self, head: Head) -> Path:
        """Folder of a head, or of the head whose weights it uses."""
        return self.place / (head.weights_of or head.name)

    def runs(self, head: Head) -> Path:
        """Folder of the runs of a head."""
        kinds = {"stand-in": self.stand_in, "compiled": self.compiled}
        return self.place / head.name / "-".join(["runs", *(name for name, on in kinds.items() if on)])

    @property
    def names(self) -> list[str]:
        """Names of the files of prompts."""
        return [file.name for file in self.prompts]

    @property
    def judged_by(self) -> dict[str, object]:
        """What a judged head depends on."""
        names = ("num_texts", "length", "steps", "batch_size", "learning_rate", "num_prompts")
        return {**{name: getattr(self, name) for name in names}, "prompts": self.names}

    def questions(self, engine: outrider.Engine, file: Path, count: int) -> list[Question]:
        """The first held-out prompts of a file, evenly from its categories; these name the file too."""
        longest = engine.parts.target.max_context - self.length
        return [
            Question(id=f"{file.stem}/{each.id}", category=f"{file.stem}: {each.category}", tokens=each.tokens)
            for each in questions(file, count, encode=engine.encode, longest=longest)
        ]

    def asked(self, engine: outrider.Engine) -> dict[str, list[Document]]:
        """Held-out prompts by their files."""
        return {
            file.stem: [document_of(each) for each in self.questions(engine, file, self.num_prompts)]
            for file in self.prompts
        }


def document_of(question: Question) -> Document:
    """A prompt without an answer."""
    return Document(tokens=np.array(question.tokens), start=len(question.tokens), domain=question.category)


def set_of(category: str) -> str:
    """The file of a category.

    Example:
        >>> set_of("gsm8k: math")
        'gsm8k'
    """
    return category.partition(":")[0]
