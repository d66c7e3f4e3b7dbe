"""What the recipe `heads` learns from and judges on: the target's texts, and its hidden states along them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.progress import Progress, TaskID
from transformers import PreTrainedModel

import outrider
from outrider.bench.workload import Question, questions
from outrider.core.types import InputError, Sampling
from outrider.embedded import EMBEDDED_TARGET
from outrider.learning.batch import Document
from outrider.lm.hf.open import open_model, open_tokenizer
from outrider.training.data.capture import capture
from outrider.training.data.records import read_documents
from outrider.training.data.regenerate import GenerationRequest, Regenerated, regenerate
from outrider.training.data.shards import Captured, Contents
from recipes.trained import PROMPT, SLOTS, TEMPERATURES, Texts, long_texts


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which texts.

    Attributes:
        data: Texts that people wrote, whose beginnings the target continues.
        prompts: Files of held-out prompts.
        num_texts: How many texts to learn from.
        length: Tokens of a text, its prompt included; the answers to held-out prompts are as long as its rest.
        num_prompts: Held-out prompts of each file.
        target: Directory or hub id.
        device: Where it runs. On the CPU what is judged is computed in float32.
    """

    data: Path
    prompts: tuple[Path, ...]
    num_texts: int
    length: int
    num_prompts: int
    target: str = str(EMBEDDED_TARGET)
    device: str = "cpu"

    def __post_init__(self) -> None:
        if len({file.stem for file in self.prompts}) < len(self.prompts):
            raise InputError("the files of --prompts must have different names")

    @property
    def dtype(self) -> str:
        """What is judged is computed in."""
        return "float32" if self.device == "cpu" else "auto"

    def model(self) -> PreTrainedModel:
        """The target, not to be trained."""
        return open_model(self.target, dtype=self.dtype, device=self.device).requires_grad_(False).eval()

    def texts(self, folder: Path, progress: Progress) -> Texts:
        """The texts that the target writes; what an earlier run has written to the folder is not written again."""
        folder.mkdir(parents=True, exist_ok=True)
        told = Told(progress)
        new = self.length - PROMPT
        texts, more = long_texts(self.data, open_tokenizer(self.target), self.num_texts, self.length)
        plain = {"drafter": "none", "max_slots": SLOTS, "device": self.device}
        engine = outrider.load(self.target, **plain)  # type: ignore[arg-type]
        generation = GenerationRequest(
            sampling=Sampling(temperature=1.0, seed=7), prompt_tokens=PROMPT, max_new_tokens=new
        )
        answers = folder / "answers.jsonl"
        regenerate(engine, texts, answers, generation, progress=told.of("the target's answers"))
        exact = outrider.load(self.target, dtype=self.dtype, **plain)  # type: ignore[arg-type]
        held: dict[int, Sequence[Document]] = {}
        for temperature in TEMPERATURES:
            found: list[Document] = []
            for file in self.prompts:
                asked = [document_of(question, file) for question in self.questions(exact, file)]
                drawn = GenerationRequest(
                    sampling=Sampling(temperature=float(temperature), seed=11), max_new_tokens=new
                )
                out = folder / f"held-{file.stem}-{len(asked)}-temperature-{temperature}.jsonl"
                regenerate(exact, asked, out, drawn, progress=told.of(f"{file.stem}, temperature {temperature}"))
                found += read_documents(out, None)
            held[temperature] = found
        return Texts(texts=texts, answers=list(read_documents(answers, None)), held=held, more=more)

    def questions(self, engine: outrider.Engine, file: Path, count: int | None = None) -> list[Question]:
        """The first held-out prompts of a file, evenly from its categories."""
        longest = engine.parts.target.max_context - self.length
        return questions(file, self.num_prompts if count is None else count, encode=engine.encode, longest=longest)


def document_of(question: Question, file: Path) -> Document:
    """A prompt without an answer; its domain names the file and the category."""
    tokens = np.array(question.tokens)
    return Document(tokens=tokens, start=len(tokens), domain=f"{file.stem}: {question.category}")


def set_of(category: str) -> str:
    """The file of a category that `document_of` made.

    Example:
        >>> set_of("gsm8k: math")
        'gsm8k'
    """
    return category.partition(":")[0]


def states(
    target: PreTrainedModel, documents: Sequence[Document], taps: tuple[int, ...], folder: Path, progress: Progress
) -> Captured:
    """The target's hidden states along texts, in a folder of their own for each choice of taps."""
    task = progress.add_task("the target's hidden states", total=len(documents))
    place = folder / f"taps-{'-'.join(map(str, taps))}"
    place.mkdir(parents=True, exist_ok=True)
    contents = Contents(taps=taps)
    return capture(target, documents, contents, out=place, progress=lambda n: progress.update(task, completed=n))


class Told:
    """Bars of progress for answers."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def of(self, name: str) -> Callable[[Regenerated], None]:
        """What `regenerate` calls."""
        task: TaskID = self.progress.add_task(name, total=None)
        return lambda now: self.progress.update(task, total=now.num_prompts, completed=now.num_done)
