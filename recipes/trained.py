"""What recipes that train drafters share: texts, runs that are judged on held-out prompts, and gains with intervals.

A drafter is judged without decoding. The target writes a text for every held-out prompt, and the rows of both models
along it say how many steps decoding is expected to take (`outrider.theory.coverage`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import outrider
from outrider.bench.claims import Claim, Paper
from outrider.bench.evidence import Estimate, Row, Sums, gain
from outrider.bench.folder import Folder
from outrider.bench.report import Table
from outrider.bench.turns import turns
from outrider.core.types import InputError, Sampling
from outrider.embedded import EMBEDDED_TARGET
from outrider.learning.batch import Document
from outrider.learning.learner import Judging, Learner
from outrider.lm.hf.open import open_config, open_model, open_tokenizer
from outrider.theory.coverage import Coverage, expected
from outrider.training.data.batches import Batches
from outrider.training.data.capture import capture
from outrider.training.data.records import read_documents
from outrider.training.data.regenerate import GenerationRequest, regenerate
from outrider.training.data.shards import Captured, Contents
from outrider.training.distill import Distilled
from outrider.training.loop.settings import Settings
from outrider.training.loop.steps import train

SLOTS = 32
"""Answers that the target writes at once."""
PROMPT = 32
"""Tokens of a text that are its prompt."""
DEPTH = 5
"""Tokens of a draft."""
TEMPERATURES = (0, 1)


@dataclass(frozen=True, kw_only=True)
class Texts:
    """What drafters learn from and what they are judged on.

    Attributes:
        texts: Texts that people wrote. Their first tokens are a prompt.
        answers: What the target says to the same prompts at temperature 1, as long as the texts.
        held: What the target says to held-out prompts, by temperature; in the order of the prompts.
        more: Further texts that people wrote.
    """

    texts: Sequence[Document]
    answers: Sequence[Document]
    held: dict[int, Sequence[Document]]
    more: Sequence[Document]

    @classmethod
    def made(
        cls,
        folder: Path,
        data: Path,
        prompts: Path,
        *,
        num_texts: int,
        length: int,
        num_prompts: int,
        target: str | None = None,
    ) -> "Texts":
        """Read texts and let the target write; what an earlier run has written to the folder is not written again.

        Args:
            folder: Where the target's answers are kept.
            data: Texts, as `outrider train data` reads them.
            prompts: Held-out prompts.
            num_texts: How many texts to learn from; each is cut to `length` tokens, and shorter ones are left out.
            num_prompts: How many of the held-out prompts to judge on, at most, spread over all of them.
            target: By default the embedded one.
        """
        folder.mkdir(parents=True, exist_ok=True)
        place = target or str(EMBEDDED_TARGET)
        tokenizer = open_tokenizer(place)
        texts, more = long_texts(data, tokenizer, num_texts, length)
        engine = outrider.load(place, drafter="none", max_slots=SLOTS)
        generation = GenerationRequest(
            sampling=Sampling(temperature=1.0, seed=7), prompt_tokens=PROMPT, max_new_tokens=length - PROMPT
        )
        regenerate(engine, texts, folder / "answers.jsonl", generation)
        exact = outrider.load(place, drafter="none", max_slots=SLOTS, dtype="float32")
        asked = spread(list(read_documents(prompts, tokenizer, prompts=True)), num_prompts)
        held: dict[int, Sequence[Document]] = {}
        for temperature in TEMPERATURES:
            drawn = Sampling(temperature=float(temperature), seed=11)
            file = folder / f"held-out-{len(asked)}-temperature-{temperature}.jsonl"
            regenerate(exact, asked, file, GenerationRequest(sampling=drawn, max_new_tokens=length - PROMPT))
            held[temperature] = list(read_documents(file, None))
        answers = list(read_documents(folder / "answers.jsonl", None))
        return cls(texts=texts, answers=answers, held=held, more=more)


def spread(documents: Sequence[Document], count: int) -> list[Document]:
    """So many documents at most, evenly from all of them.

    Example:
        >>> texts = [Document(tokens=np.array([i]), start=0) for i in range(9)]
        >>> [int(text.tokens[0]) for text in spread(texts, 3)]
        [0, 4, 8]
    """
    places = np.linspace(0, len(documents) - 1, min(count, len(documents))).round().astype(int)
    return [documents[i] for i in places.tolist()]


def long_texts(data: Path, tokenizer: Any, count: int, length: int) -> tuple[list[Document], list[Document]]:
    """Texts of one length, drawn from all that are long enough; and the others."""
    found = [each for each in read_documents(data, tokenizer, max_tokens=length) if len(each.tokens) == length]
    if len(found) < count:
        raise InputError(f"{data} has {len(found)} texts of {length} tokens; ask for at most as many")
    order = np.random.default_rng(0).permutation(len(found)).tolist()
    texts = [Document(tokens=found[i].tokens, start=PROMPT, domain=found[i].domain) for i in order[:count]]
    return texts, [found[i] for i in order[count:]] or texts


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to make a drafter.

    Attributes:
        name: Unique within a recipe.
        learner: A fresh learner, by seed.
        batches: Its data, by seed.
        settings: How it is trained, by seed; None does not train it.
    """

    name: str
    learner: Callable[[int], Learner]
    batches: Callable[[int], Batches] | None = None
    settings: Callable[[int], Settings] | None = None


def made(place: Folder, ways: Iterable[Way], seeds: int, texts: Texts, keep: Path) -> list[Row]:
    """Make every drafter with every seed and judge it: a row for each way, seed, temperature and prompt.

    Args:
        keep: Folder of the drafters. One that an earlier run has made is not made again.
    """

    def run(turn: Any) -> Row:
        way, seed = turn.way, turn.job
        learner = way.learner(seed.number)
        done: dict[str, Any] = {}
        if way.settings is not None and way.batches is not None:
            found = train(learner, way.batches(seed.number), way.settings(seed.number), keep / way.name / seed.name)
            done = {"steps": found.step}
        learner.eval()
        return {"method": way.name, "seed": seed.number, **done, "each": judged(learner, texts)}

    todo = list(turns(list(ways), [Seed(number=number) for number in range(seeds)], seed="made"))
    return [
        {"method": row["method"], "seed": row["seed"], **each}
        for row in place.take("made", todo, run)
        for each in row["each"]
    ]


@dataclass(frozen=True, kw_only=True)
class Seed:
    """The seed of a run, as the job of a turn."""

    number: int

    @property
    def name(self) -> str:
        """As rows name it."""
        return f"seed-{self.number}"


def judged(learner: Any, texts: Texts, depth: int = DEPTH) -> list[Row]:
    """Expected tokens and steps for every held-out prompt: a row per prompt, with both temperatures.

    `accepted_T_k` is the expected number of places at which the first k draft tokens are accepted.

    A text is read up to the last place that has room for a whole draft.
    """
    device = next(learner.parameters()).device
    if not isinstance(learner, Judging):
        raise TypeError(f"{type(learner).__name__} cannot be judged along texts")
    rows: list[Row] = []
    for number, pair in enumerate(zip(*(texts.held[each] for each in TEMPERATURES), strict=True)):
        if any(len(each.tokens) - each.start < 2 * depth for each in pair):
            continue
        row: Row = {"prompt": str(number), "category": pair[0].domain or ""}
        for temperature, document in zip(TEMPERATURES, pair, strict=True):
            batch = Batches([document], batch_size=1, max_length=len(document.tokens), seed=0).batch(0).to(device)
            with torch.no_grad():
                found = learner.judged(batch, depth)
            chances = found.agrees.astype(float) if temperature == 0 else np.exp(np.minimum(found.log_ratios, 0))
            for length in range(1, depth + 1):
                told, name = covered(chances[:, :length]), of(temperature, length)
                accepted = float(chances[:, :length].prod(1).sum())
                row |= {f"tokens_{name}": told.tokens, f"steps_{name}": told.steps, f"accepted_{name}": accepted}
            row |= {f"first_{temperature}": float(chances[:, 0].sum()), f"places_{temperature}": len(chances)}
        rows.append(row)
    return rows


def of(temperature: int, length: int = DEPTH) -> str:
    """How fields of a row end that are of drafts of this length."""
    return f"{temperature}_{length}"


def covered(chances: Float[np.ndarray, "places depth"]) -> Coverage:
    """Expected steps that begin at these places, and the tokens that they emit, with chains and token verification.

    Args:
        chances: Probability that a step that begins at a place accepts its i-th token, if it has accepted those before.

    Example:
        >>> covered(np.ones((4, 1))), covered(np.zeros((2, 3)))
        (Coverage(steps=2.0, tokens=4.0), Coverage(steps=2.0, tokens=2.0))
    """
    begin = np.ones((len(chances), 1))
    survivals = list(np.concatenate([begin, np.cumprod(chances, 1)], 1))
    return expected(survivals, len(chances) + chances.shape[1])


def short_run(seed: int, steps: int, batch_size: int, length: int, learning_rate: float) -> Settings:
    """How the drafters of a comparison are trained: all in bfloat16 products, and the last weights are kept."""
    return Settings(
        steps=steps,
        batch_size=batch_size,
        max_length=length,
        learning_rate=learning_rate,
        warmup=max(1, steps // 10),
        precision="bf16",
        seed=seed,
        device="cpu",
        save_every=1000,
        watch_every=1000,
        keep_best=False,
    )


def embedded_target() -> PreTrainedModel:
    """The embedded target in float32, not to be trained."""
    return open_model(str(EMBEDDED_TARGET), dtype=torch.float32, device="cpu").requires_grad_(False).eval()


def fresh_draft(shape: dict[str, int], seed: int = 0) -> LlamaForCausalLM:
    """A draft model with random weights and the embedded target's vocabulary, its embeddings tied to its output."""
    theirs = open_config(str(EMBEDDED_TARGET))
    config = LlamaConfig(
        vocab_size=theirs.vocab_size,
        max_position_embeddings=theirs.max_position_embeddings,
        rms_norm_eps=theirs.rms_norm_eps,
        bos_token_id=theirs.bos_token_id,
        eos_token_id=theirs.eos_token_id,
        pad_token_id=theirs.pad_token_id,
        tie_word_embeddings=True,
        **shape,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


def draft_of_text(place: Path, corpus: Sequence[Document], settings: Settings, shape: dict[str, int]) -> Path:
    """A draft model that has learnt texts by their own tokens, trained unless an earlier run has; its folder."""
    if not (place / "config.json").is_file():
        batches = Batches(corpus, batch_size=settings.batch_size, max_length=settings.max_length, seed=settings.seed)
        learner = Distilled(fresh_draft(shape, settings.seed), None, loss=None)
        train(learner, batches, settings, place)
    return place


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What all drafters of a comparison have in common.

    Attributes:
        num_texts: Texts to learn from.
        length: Tokens of a text.
        steps: Optimizer steps of every drafter.
        batch_size: Rows of a step.
        learning_rate: The highest.
        seeds: How often every drafter is made.
        num_prompts: Held-out prompts, at most.
        text_steps: Steps on text, with twice as many rows, of the draft model that all begin with; 0: none.
    """

    num_texts: int
    length: int
    steps: int
    batch_size: int
    learning_rate: float
    seeds: int
    num_prompts: int
    text_steps: int = 0

    @property
    def num_tokens(self) -> int:
        """Most tokens that a drafter reads."""
        return self.steps * self.batch_size * self.length

    @property
    def num_text_tokens(self) -> int:
        """Most tokens of text that the draft model has read before."""
        return 2 * self.text_steps * self.batch_size * self.length

    def settings(self, seed: int) -> Settings:
        """How a drafter is trained."""
        return short_run(seed, self.steps, self.batch_size, self.length, self.learning_rate)

    def texts(self, work: Path, data: Path, prompts: Path) -> Texts:
        """Texts and answers, in a folder that all recipes with the same texts may share."""
        counts = {"num_texts": self.num_texts, "length": self.length, "num_prompts": self.num_prompts}
        return Texts.made(work / "texts", data, prompts, **counts)  # type: ignore[arg-type]

    def draft(self, work: Path, texts: Texts, shape: dict[str, int]) -> Path:
        """The draft model that has learnt text; its folder."""
        on_text = short_run(0, self.text_steps, 2 * self.batch_size, self.length, 3e-3)
        return draft_of_text(work / f"draft-{self.text_steps}", texts.more, on_text, shape)

    def batches(self, documents: Sequence[Document], captured: Captured | None) -> Callable[[int], Batches]:
        """The batches of these documents, by seed."""
        return lambda seed: Batches(
            documents, batch_size=self.batch_size, max_length=self.length, seed=seed, captured=captured
        )


def kept_states(target: PreTrainedModel, documents: Sequence[Document]) -> Captured:
    """The target's last hidden states along documents, in memory: all its rows follow from them."""
    return capture(target, documents, Contents(taps=(target.config.num_hidden_layers,)))


def against(
    paper: Paper,
    sums: Sums,
    sentence: str,
    ours: str,
    theirs: str,
    temperature: int,
    *,
    published: float | str | None,
    note: str = "",
) -> Claim:
    """A claim that a drafter makes a step emit more tokens than another."""
    over, under = f"tokens_{of(temperature)}", f"steps_{of(temperature)}"
    return paper.claim(
        f"{sentence}, temperature {temperature}.",
        gain(sums.ratio(ours, over, under), sums.ratio(theirs, over, under)),
        num_prompts=sums.num_prompts,
        published=published,
        unit="% of block efficiency",
        least=0.0,
        note=note,
        rests_on=(ours, theirs),
    )


def efficiencies(sums: Sums, methods: Sequence[str], rows: Sequence[Row]) -> Table:
    """Block efficiency and acceptance of the first token of each drafter, and its spread over seeds."""
    lines: list[Sequence[object]] = []
    for method in methods:
        line: list[object] = [method]
        for temperature in TEMPERATURES:
            over, under = f"tokens_{of(temperature)}", f"steps_{of(temperature)}"
            own = [row for row in rows if row["method"] == method]
            seeds = sorted({row["seed"] for row in own})
            runs = [[row for row in own if row["seed"] == seed] for seed in seeds]
            each = [sum(row[over] for row in run) / sum(row[under] for row in run) for run in runs]
            first = sums.ratio(method, f"first_{temperature}", f"places_{temperature}")
            line += [Estimate.of(sums.ratio(method, over, under)).text(".3f")]
            line += [f"{min(each):.3f} to {max(each):.3f}", Estimate.of(first).text(".3f")]
        lines.append(line)
    head = ["drafter"]
    for temperature in TEMPERATURES:
        head += [f"tokens per step, T {temperature}", f"by seed, T {temperature}", f"first token, T {temperature}"]
    return Table(title="Block efficiency, chains of 5 tokens", head=head, lines=lines)
