"""What the recipe `heads` is told: which texts, how heads are trained, and how they decode."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

import outrider
from outrider.bench.workload import Question, questions
from outrider.core.types import InputError
from outrider.learning.batch import Document
from recipes import options
from recipes.head_ways import Head
from recipes.trained import Budget

PromptFiles = Annotated[list[Path], typer.Option(help="Held-out prompts; may be given several times.")]
PromptsOfFile = Annotated[int, typer.Option(min=1, help="Held-out prompts of each file.")]
TimedPrompts = Annotated[int, typer.Option(min=1, help="Prompts of each file to decode.")]
Engine = Annotated[bool, typer.Option("--engine", help="Decode with the heads too, in turns; wants quiet.")]
StandIn = Annotated[bool, typer.Option("--stand-in", help="Decode with the stand-in of 110M parameters.")]
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

    def __post_init__(self) -> None:
        if len({file.stem for file in self.prompts}) < len(self.prompts):
            raise InputError("the files of --prompts must have different names")

    @property
    def decodes(self) -> bool:
        """Whether heads decode too."""
        return self.engine or self.stand_in or self.compiled

    @property
    def place(self) -> Path:
        """Folder of all heads of this budget."""
        return self.work / f"heads-{self.num_texts}x{self.length}-{self.steps}x{self.batch_size}"

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
