"""What recipes that train drafters share: texts, runs that are judged on held-out prompts, and gains with intervals.

A drafter is judged without decoding. The target writes a text for every held-out prompt, and the rows of both models
along it say how many steps decoding is expected to take (`outrider.theory.coverage`).
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import outrider
from outrider.bench.evidence import IntervalEstimate, Row, Sums
from outrider.bench.folder import Folder, folder
from outrider.bench.report import Claim, Findings, Table
from outrider.bench.turns import W, turns
from outrider.core.progress import task
from outrider.core.types import InputError, Sampling
from outrider.embedded import EMBEDDED_TARGET
from outrider.host.threads import use_threads
from outrider.learning.batch import Document, TrainBatch
from outrider.learning.learner import Judging, Learner
from outrider.lm.hf.open import open_config, open_model, open_tokenizer
from outrider.theory.coverage import Coverage, expected_coverage
from outrider.training.data.batches import Batches, CapturedStates
from outrider.training.data.capture import CaptureMode, capture
from outrider.training.data.records import read_documents
from outrider.training.data.regenerate import AnswerOptions, regenerate
from outrider.training.data.shards import Captured, Contents
from outrider.training.distill import Distilled
from outrider.training.loop.settings import TrainSettings
from outrider.training.loop.steps import Progress, train
from recipes import options
from recipes.inquiry.papers import Paper, gain
from recipes.label import Label

SLOTS = 32
"""Answers that the target writes at once."""
PROMPT = 32
"""Tokens of a text that are its prompt."""
OFTEN = CaptureMode(shard_bytes=2**26)
"""How the target's states are captured: in small shards, because only whole ones count as progress."""
DEPTH = 5
"""Tokens of a draft."""
TEMPERATURES = (0, 1)
PRECISION = "bf16"
"""Of the products in training."""
AMOUNTS = ("num_texts", "length", "steps", "batch_size", "learning_rate", "seeds", "num_prompts", "text_steps", "out")
"""What is recorded of a budget."""
QUICK = {"num_texts": 24, "steps": 2, "num_prompts": 4, "length": 48, "batch_size": 4, "seeds": 1}


def shape(layers: int, width: int, inner: int) -> dict[str, int]:
    """Sizes of a Llama whose heads are 64 wide and share one head of keys and values."""
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "num_key_value_heads": 1,
    }


SHAPE = shape(1, 256, 768)
"""Of draft models that are trained here."""


@dataclass(frozen=True, kw_only=True)
class Texts:
    """What drafters learn from and what they are judged on.

    Attributes:
        texts: Texts that people wrote. Their first tokens are a prompt.
        answers: What the target says to the same prompts at temperature 1, as long as the texts.
        held: What the target says to held-out prompts, by temperature; in the order of the prompts.
        more: Further texts that people wrote.
        states: The target's hidden states along the held-out texts, by temperature; empty if they are not kept.
    """

    texts: Sequence[Document]
    answers: Sequence[Document]
    held: dict[int, Sequence[Document]]
    more: Sequence[Document]
    states: dict[int, Captured] = field(default_factory=dict)

    def with_states(self, target: PreTrainedModel, taps: Sequence[int] = ()) -> "Texts":
        """The same with the target's states along the held-out texts, so that no judgement runs the target again.

        Args:
            taps: As those of `kept_states`.
        """
        return replace(self, states={each: kept_states(target, held, taps) for each, held in self.held.items()})

    def batch_of(self, temperature: int, number: int) -> TrainBatch:
        """A held-out text as a batch, with the states that are kept."""
        document, states = self.held[temperature][number], self.states.get(temperature)
        kept = None if states is None else _StatesOf(states, number)
        return Batches([document], batch_size=1, max_length=len(document.tokens), seed=0, captured=kept).batch(0)

    def judge(self, learner: Any) -> list[Row]:
        """What `judged` says of a learner along the held-out texts."""
        return judged(learner, self)


@dataclass(frozen=True)
class _StatesOf:
    """The states of one document, as those of a corpus of this document alone."""

    kept: Captured
    number: int

    def states(self, number: int, first: int = 0, last: int | None = None) -> CapturedStates:
        return self.kept.states(self.number, first, last)


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
    settings: Callable[[int], TrainSettings] | None = None


def seeds_of(count: int) -> list[Label]:
    """The first seeds, as the jobs of turns."""
    return Label.each(range(count), "seed-{}")


def made(place: Folder, ways: Iterable[Way], seeds: int, keep: Path, judge: Callable[[Any], list[Row]]) -> list[Row]:
    """Make every drafter with every seed and judge it: a row for each way and seed, and each thing it is judged on.

    Args:
        keep: Folder of the drafters. One that an earlier run has made is not made again.
        judge: Judges a learner, such as `judged`.
    """

    def run(way: Way, seed: Label) -> Row:
        return learnt(way, seed.value, keep / way.name / seed.name, judge)

    return over_seeds(place, "made", list(ways), seeds, run)


def over_seeds(place: Folder, phase: str, ways: Sequence[W], seeds: int, run: Callable[[W, Label], Row]) -> list[Row]:
    """Take every way with every seed in turns: a row for each thing in the `each` of what a turn found.

    Args:
        run: Takes a turn; its row has `method`, `seed` and `each`.
    """
    found = place.take(phase, turns(ways, seeds_of(seeds), seed=phase), lambda turn: run(turn.way, turn.job))
    return [{"method": row["method"], "seed": row["seed"], **each} for row in found for each in row["each"]]


def learnt(
    way: Way,
    seed: int,
    place: Path,
    judge: Callable[[Any], list[Row]],
    progress: Callable[[Progress], None] | None = None,
) -> Row:
    """Make a drafter with a seed in its folder, and judge it."""
    learner = way.learner(seed)
    done: dict[str, Any] = {}
    if way.settings is not None and way.batches is not None:
        done = {"steps": train(learner, way.batches(seed), way.settings(seed), place, progress=progress).step}
    learner.eval()
    return {"method": way.name, "seed": seed, **done, "each": judge(learner)}


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
        for temperature in TEMPERATURES:
            batch = texts.batch_of(temperature, number).to(device)
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
    return expected_coverage(survivals, len(chances) + chances.shape[1])


def short_run(
    seed: int, steps: int, batch_size: int, length: int, learning_rate: float, precision: str = PRECISION
) -> TrainSettings:
    """How the drafters of a comparison are trained: all in products of one type, and the last weights are kept."""
    return TrainSettings(
        steps=steps,
        batch_size=batch_size,
        max_length=length,
        learning_rate=learning_rate,
        warmup=max(1, steps // 10),
        precision=precision,
        seed=seed,
        device="cpu",
        save_every=1000,
        watch_every=1000,
        keep_best=False,
    )


def embedded_target() -> PreTrainedModel:
    """The embedded target in float32, not to be trained."""
    return open_model(str(EMBEDDED_TARGET), dtype=torch.float32, device="cpu").requires_grad_(False).eval()


def fresh_draft(shape: dict[str, int], seed: int = 0, target: str = str(EMBEDDED_TARGET)) -> LlamaForCausalLM:
    """A draft model with random weights and the target's vocabulary, its embeddings tied to its output."""
    theirs = open_config(target)
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


def draft_of_text(
    place: Path,
    corpus: Sequence[Document],
    settings: TrainSettings,
    shape: dict[str, int],
    target: str = str(EMBEDDED_TARGET),
) -> Path:
    """A draft model that has learnt texts by their own tokens, trained unless an earlier run has; its folder."""
    if not (place / "config.json").is_file():
        batches = Batches(corpus, batch_size=settings.batch_size, max_length=settings.max_length, seed=settings.seed)
        learner = Distilled(fresh_draft(shape, settings.seed, target), None, loss=None)
        train(learner, batches, settings, place)
    return place


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a recipe that trains drafters is told; all its drafters have it in common.

    Attributes:
        text_steps: Steps on text, with twice as many rows, of the draft model that all begin with; 0: none.
        draft: The draft model that all begin with, instead.
        device: Where the target runs. On the CPU what is judged is computed in float32.
    """

    data: options.Data
    work: options.Work
    prompts: options.Prompts
    out: options.Out = None
    num_texts: options.NumTexts = 3000
    length: options.Length = 128
    steps: options.Steps = 150
    text_steps: options.TextSteps = 0
    batch_size: options.BatchSize = 8
    learning_rate: options.LearningRate = 1e-3
    precision: options.Precision = PRECISION
    seeds: options.Seeds = 3
    num_prompts: options.NumPrompts = 1000
    threads: options.Threads = 1
    target: options.TargetOfAll = str(EMBEDDED_TARGET)
    draft: options.BeginsWith = None
    device: str = "cpu"

    @contextmanager
    def folder(self, recipe: str, **more: object) -> Iterator[Folder]:
        """The folder of a recipe's run, with all that its rows depend on.

        Args:
            more: What the recipe is told besides.
        """
        use_threads(self.threads)
        told = {name: getattr(self, name) for name in AMOUNTS}
        if not self.of_embedded:
            told["target"] = self.target
        if self.draft is not None:
            told["begins_with"] = self.draft
        if self.precision != PRECISION:
            told["precision"] = self.precision
        with folder(self.out, recipe, {**told, **more}) as place:
            yield place

    @property
    def of_embedded(self) -> bool:
        """Whether drafters are made for the embedded target."""
        return self.target == str(EMBEDDED_TARGET)

    @property
    def own_work(self) -> Path:
        """Folder of what the target says and of its drafters: each target writes texts of its own."""
        return self.work if self.of_embedded else self.work / Path(self.target).name

    @property
    def judging_dtype(self) -> str:
        """What is judged is computed in."""
        return "float32" if self.device == "cpu" else "auto"

    def model(self) -> PreTrainedModel:
        """The target, not to be trained."""
        return open_model(self.target, dtype=self.judging_dtype, device=self.device).requires_grad_(False).eval()

    @property
    def num_tokens(self) -> int:
        """Most tokens that a drafter reads."""
        return self.steps * self.batch_size * self.length

    @property
    def num_text_tokens(self) -> int:
        """Most tokens of text that the draft model has read before."""
        return 2 * self.text_steps * self.batch_size * self.length

    def settings(self, seed: int) -> TrainSettings:
        """How a drafter is trained."""
        return short_run(seed, self.steps, self.batch_size, self.length, self.learning_rate, self.precision)

    def texts(self) -> Texts:
        """What to learn from and to judge on; what an earlier run has written to the folder is not written again.

        All recipes with the same texts may share the working folder.
        """
        place, new = self.own_work / "texts", self.length - PROMPT
        place.mkdir(parents=True, exist_ok=True)
        texts, more = long_texts(self.data, open_tokenizer(self.target, what="model"), self.num_texts, self.length)

        def written(engine: outrider.Engine, asked: Sequence[Document], name: str, **how: Any) -> list[Document]:
            request = AnswerOptions(max_new_tokens=new, **how)
            with task(name, unit="prompts") as bar:
                regenerate(
                    engine,
                    asked,
                    place / f"{name}.jsonl",
                    request,
                    progress=lambda now: bar.reach(now.num_done, now.num_prompts),
                )
            return list(read_documents(place / f"{name}.jsonl", None))

        plain: dict[str, Any] = {"drafter": "none", "max_slots": SLOTS, "device": self.device}
        engine = outrider.load(self.target, **plain)
        answers = written(engine, texts, "answers", sampling=Sampling(temperature=1.0, seed=7), prompt_tokens=PROMPT)
        exact = outrider.load(self.target, **plain, dtype=self.judging_dtype)
        held: dict[int, Sequence[Document]] = {}
        for temperature in TEMPERATURES:
            drawn = Sampling(temperature=float(temperature), seed=11)
            held[temperature] = [
                document
                for name, asked in self.asked(exact).items()
                for document in written(
                    exact, asked, f"held-{name}-{len(asked)}-temperature-{temperature}", sampling=drawn
                )
            ]
        return Texts(texts=texts, answers=answers, held=held, more=more)

    def asked(self, engine: outrider.Engine) -> dict[str, list[Document]]:
        """Held-out prompts, by a name for what the target says to them."""
        found = list(read_documents(self.prompts, engine.tokenizer, prompts=True))
        return {"out": spread(found, self.num_prompts)}

    def beginning(self, texts: Texts) -> Path:
        """The draft model that all begin with; its folder."""
        if self.draft is not None:
            return self.draft
        on_text = short_run(0, self.text_steps, 2 * self.batch_size, self.length, 3e-3, self.precision)
        return draft_of_text(self.own_work / f"draft-{self.text_steps}", texts.more, on_text, SHAPE, self.target)

    def drafters(self, recipe: str) -> Path:
        """Folder of the drafters of a recipe: those that begin with another draft model are others."""
        return self.own_work / (recipe if self.draft is None else f"{recipe}-from-{self.draft.resolve().name}")

    @property
    def began(self) -> str:
        """What all begin with, for people."""
        if self.draft is not None:
            return f"The draft model `{self.draft.name}`,"
        return (
            f"A draft model of {SHAPE['num_hidden_layers']} layer of width {SHAPE['hidden_size']}, first trained on "
            f"{self.num_text_tokens:,} tokens of text, then"
        )

    def batches(self, documents: Sequence[Document], captured: Captured | None) -> Callable[[int], Batches]:
        """The batches of these documents, by seed."""
        return lambda seed: Batches(
            documents, batch_size=self.batch_size, max_length=self.length, seed=seed, captured=captured
        )


def kept_states(target: PreTrainedModel, documents: Sequence[Document], taps: Sequence[int] = ()) -> Captured:
    """The target's hidden states along documents, in memory.

    Args:
        taps: By default the last one alone, from which all rows of the target follow.
    """
    contents = Contents(taps=tuple(taps) or (target.config.num_hidden_layers,))
    with task("the target's states", len(documents), "texts") as bar:
        return capture(target, documents, contents, way=OFTEN, progress=bar.reach)


@dataclass(frozen=True)
class Contrast:
    """A published sentence: one drafter is better than another. Recipes write them as rows of a table.

    Attributes:
        says: The claim, without its temperature.
        ours: The better drafter.
        theirs: The other.
        published: The paper's figure, or its figure at each temperature.
    """

    paper: Paper
    says: str
    ours: str
    theirs: str
    _: KW_ONLY
    published: float | str | Mapping[int, str] | None = None
    note: str = ""

    def claim(
        self, found: IntervalEstimate, temperature: int, num_prompts: int, unit: str, rests_on: Sequence[str] = ()
    ) -> Claim:
        """What was found, at a temperature."""
        published = self.published[temperature] if isinstance(self.published, Mapping) else self.published
        return self.paper.claim(
            f"{self.says}, temperature {temperature}.",
            found,
            num_prompts=num_prompts,
            published=published,
            unit=unit,
            least=0.0,
            note=self.note,
            rests_on=rests_on or (self.ours, self.theirs),
        )


Figure = Callable[[str, int], Float[np.ndarray, " samples"]]
"""A figure of a drafter at a temperature, with its bootstrap."""


def contrasted(
    contrasts: Sequence[Contrast],
    sums: Sums,
    figure: Figure | None = None,
    *,
    unit: str = "% of block efficiency",
    by: Callable[..., IntervalEstimate] = gain,
) -> list[Claim]:
    """The contrasts at both temperatures.

    Args:
        figure: What is compared; by default tokens per step.
        by: The comparison of two figures.
    """
    measured = figure or functools.partial(efficiency, sums)
    return [
        each.claim(by(measured(each.ours, t), measured(each.theirs, t)), t, sums.num_prompts, unit)
        for t in TEMPERATURES
        for each in contrasts
    ]


def efficiency(sums: Sums, method: str, temperature: int, length: int = DEPTH) -> Float[np.ndarray, " samples"]:
    """Tokens per step with drafts of a length."""
    name = of(temperature, length)
    return sums.ratio(method, f"tokens_{name}", f"steps_{name}")


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
            line += [IntervalEstimate.of(efficiency(sums, method, temperature)).text(".3f")]
            line += [f"{min(each):.3f} to {max(each):.3f}", IntervalEstimate.of(first).text(".3f")]
        lines.append(line)
    head = ["drafter"]
    for temperature in TEMPERATURES:
        head += [f"tokens per step, T {temperature}", f"by seed, T {temperature}", f"first token, T {temperature}"]
    return Table(title="Block efficiency, chains of 5 tokens", head=head, lines=lines)


def compare(
    recipe: str,
    budget: Budget,
    ways: Callable[[Path, PreTrainedModel, Texts, Budget], list[Way]],
    contrasts: Sequence[Contrast],
    learns: str,
) -> None:
    """Train the draft model that has learnt text further in all ways, and write how these compare.

    Args:
        ways: Makes them, of the draft model's folder and the target.
        learns: What the rows of a step are, in words.
    """
    with budget.folder(recipe) as place:
        texts = budget.texts()
        target = budget.model()
        found = ways(budget.beginning(texts), target, texts, budget)
        rows = made(place, found, budget.seeds, budget.drafters(recipe), texts.with_states(target).judge)
        about = (
            f"{budget.began} {budget.steps} steps of {budget.batch_size} rows{learns}, with {budget.seeds} seeds. "
            f"Held-out prompts: {Sums(rows).num_prompts}."
        )
        place.finish(findings(rows, contrasts, about))


def findings(
    rows: Sequence[Row], contrasts: Sequence[Contrast], about: str, methods: Sequence[str] | None = None
) -> Findings:
    """The table and the claims of drafters that are compared by tokens per step.

    Args:
        methods: The order of the table; by default that of the rows.
    """
    sums = Sums(rows, crossed=True)
    table = efficiencies(sums, methods or sums.methods, rows)
    return Findings(tables=[table], claims=contrasted(contrasts, sums), text=about)
