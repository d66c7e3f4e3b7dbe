"""Online speculative decoding: a draft model that learns from a shifting stream, against a frozen one (Liu 2023).

`python -m recipes online --data TEXTS --out DIR` serves openings of stories, then of Python files, then of word
problems. The draft model learns from these requests while they run. Every request is new, and it is drafted with the
weights that the requests before it have taught. It is judged along its own output with these weights, and with those
that the draft model began with. A seed is another order of the prompts, with other draws.

`recipes/small_draft` guesses well on all these domains from the begin. `--text-steps 500 --work DIR` begins with a
draft model that has read only the other domains of the data, so that there is more to learn.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

import outrider
from outrider.bench.evidence import IntervalEstimate, Row, Sums
from outrider.bench.folder import folder
from outrider.bench.report import Claim, Findings, Table
from outrider.core.progress import task
from outrider.core.types import InputError, Sampling
from outrider.embedded import EMBEDDED_TARGET
from outrider.host.threads import use_threads
from outrider.lm.hf.open import open_model, open_tokenizer
from outrider.training.data.records import read_documents
from outrider.training.data.sources import records
from outrider.training.online.learning import Learning
from outrider.training.online.pupil import OnlineSettings
from outrider.training.online.weights import model_of
from recipes import options
from recipes.inquiry.papers import Paper, gain
from recipes.label import Label
from recipes.trained import PROMPT, TEMPERATURES, covered, draft_of_text, over_seeds, shape, short_run

PAPER = Paper(name="Liu et al. 2023, OSD", url="https://arxiv.org/abs/2310.07177")
PUBLISHED = "+0.1 to +0.65"
"""How much the paper's acceptance rates rise."""
DRAFT = Path(__file__).parent / "small_draft"
PARTS = 4
"""The requests of a domain are shown in so many parts, one after another."""
QUICK = {"requests": 4, "max_new_tokens": 10, "interval": 2, "seeds": 1}
Prompts = dict[str, list[list[int]]]
"""Prompts by domain, in the order in which the domains come."""
DEPTH = 4
"""Tokens of a draft."""
FROZEN, LEARNING = ARMS = ("frozen", "learning")
OPENING = 512
"""Characters of a text that are read for its prompt."""
SHAPE = shape(1, 128, 384)
"""Of a draft model that is trained here; that of `recipes/small_draft`."""
LENGTH = 128
"""Tokens of a text that it is trained on."""


@dataclass(frozen=True, kw_only=True)
class Stream:
    """What is asked for: a stream of requests, and how a draft model learns from it."""

    data: Annotated[Path, typer.Option(help="JSON lines with `domain` and `text`, plain or gzipped.")]
    out: options.Out = None
    target: options.Target = None
    draft: options.Draft = DRAFT
    text_steps: Annotated[
        int, typer.Option(min=0, help="Begin with a draft model that has learnt the other domains so many steps.")
    ] = 0
    work: Annotated[Path | None, typer.Option(help="Folder of that draft model.")] = None
    domains: Annotated[str, typer.Option(help="Domains in the order in which they come.")] = "story,python,math"
    requests: Annotated[int, typer.Option(min=PARTS, help="Requests of a domain.")] = 128
    max_new_tokens: Annotated[int, typer.Option(min=DEPTH + 1, help="Most tokens per request.")] = 64
    interval: Annotated[int, typer.Option(min=1, help="Requests at once, and between two optimizer steps.")] = 4
    learning_rate: Annotated[float, typer.Option(help="Of AdamW.")] = 1e-4
    margin: Annotated[
        float, typer.Option(min=0, max=1, help="How far acceptance may fall before older weights come back; 1: never.")
    ] = 0.1
    seeds: options.Seeds = 3
    threads: options.Threads = 1

    def __post_init__(self) -> None:
        if self.text_steps and self.work is None:
            raise InputError("--text-steps trains a draft model; name a folder for it with --work")

    @property
    def names(self) -> list[str]:
        """Names of the domains."""
        return options.words(self.domains)

    @property
    def place(self) -> str:
        """Where the target is."""
        return self.target or str(EMBEDDED_TARGET)

    @property
    def depends_on(self) -> dict[str, object]:
        """What rows depend on."""
        names = ("data", "target", "domains", "requests", "seeds", "max_new_tokens", "interval", "learning_rate")
        begins = self.draft if not self.text_steps else f"other domains, {self.text_steps} steps"
        return {name: getattr(self, name) for name in (*names, "margin", "out")} | {"begins_with": begins}

    def draft_model(self, tokenizer: Any) -> Path:
        """The draft model that the stream begins with."""
        if not self.text_steps or self.work is None:
            return self.draft
        own = self.work / f"without-{'-'.join(self.names)}-{self.text_steps}"
        return outsider(own, self.data, self.names, self.text_steps, tokenizer)

    def waves(self, asked: Prompts, seed: int) -> Iterator[tuple[str, int, list[int]]]:
        """Domain, place of the first request, and numbers of the prompts that run at once, in the order of a seed."""
        for domain, prompts in asked.items():
            order = np.random.default_rng([seed, len(prompts)]).permutation(len(prompts)).tolist()
            for begin in range(0, len(order), self.interval):
                yield domain, begin, order[begin : begin + self.interval]

    def served(
        self,
        asked: Prompts,
        draft: Path,
        temperature: int,
        seed: int,
        target: PreTrainedModel,
        done: Callable[[], None],
    ) -> Row:
        """Serve all requests, and judge each with both draft models.

        Args:
            draft: Directory of the draft model.
            target: The target in float32, to judge with.
            done: Called after each wave.
        """
        engine = outrider.load(
            self.place,
            drafter=f"model:path={draft}",
            length=f"fixed:{DEPTH}",
            verifier="token",
            max_slots=self.interval,
            dtype="float32",
        )
        settings = OnlineSettings(interval=self.interval, learning_rate=self.learning_rate, margin=self.margin)
        learning = Learning(engine, settings)
        pupil = learning.pupils[0]
        arms = {arm: _copied(model_of(pupil.draft.drafter)) for arm in ARMS}
        each: list[Row] = []
        for domain, begin, numbers in self.waves(asked, seed):
            # All requests of a wave begin together, with these weights.
            _overwrite(arms[LEARNING], model_of(pupil.draft.drafter))
            first = 1_000_003 * seed + 1_009 * len(each)
            drawn = [Sampling(temperature=float(temperature), seed=first + i) for i in range(len(numbers))]
            prompts = [asked[domain][number] for number in numbers]
            outputs = engine.generate(prompts, max_new_tokens=self.max_new_tokens, sampling=drawn)
            told = judged(target, arms, prompts, [output.tokens for output in outputs], temperature)
            for i, (number, output) in enumerate(zip(numbers, outputs, strict=True)):
                row: Row = {"prompt": f"{domain} {number}", "category": domain, "place": begin + i}
                row |= {"temperature": temperature}
                row |= {"drafted": output.num_draft_tokens, "accepted": output.num_accepted_tokens}
                each.append(row | told[i])
            done()
        learning.finish()
        return {"rounds": pupil.draft.num_rounds, "rollbacks": pupil.num_rollbacks, "each": each}


def _copied(model: PreTrainedModel) -> PreTrainedModel:
    with torch.inference_mode(False):
        return copy.deepcopy(model).float().requires_grad_(False)


def _overwrite(model: PreTrainedModel, newest: PreTrainedModel) -> None:
    with torch.inference_mode(False), torch.no_grad():
        for own, other in zip(model.parameters(), newest.parameters(), strict=True):
            own.copy_(other)


@torch.no_grad()
def judged(
    target: PreTrainedModel,
    drafts: Mapping[str, PreTrainedModel],
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    temperature: int,
) -> list[dict[str, Row]]:
    """How draft models do along outputs of the target: for each output, the figures of each draft model.

    `tokens` and `steps` are expected ones, `first` is the sum over `places` of the chance that a draft token there is
    accepted. An output without room for a draft counts nothing, so that each prompt has figures with each seed.

    Args:
        temperature: 0 or 1, at which the target wrote the outputs.
    """
    texts = [torch.tensor([*prompt, *output]) for prompt, output in zip(prompts, outputs, strict=True)]
    # What stands behind a text changes no row of it.
    tokens = pad_sequence(texts, batch_first=True)
    theirs = _log_rows(target, tokens)
    found: list[dict[str, Row]] = [{} for _ in texts]
    for name, draft in drafts.items():
        ours = _log_rows(draft, tokens)
        if temperature == 0:
            chances = (ours.argmax(-1) == theirs.argmax(-1)).double()
        else:
            log_q, log_p = (rows.gather(-1, tokens[:, 1:, None])[..., 0].double() for rows in (ours, theirs))
            chances = (log_q - log_p).clamp(max=0).exp()
        for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            found[i][name] = _figures(chances[i, len(prompt) - 1 : len(text) - 1].numpy())
    return found


def _log_rows(model: PreTrainedModel, tokens: Int[Tensor, "texts length"]) -> Float[Tensor, "texts places vocab"]:
    return model(input_ids=tokens[:, :-1], use_cache=False).logits.log_softmax(-1)


def _figures(chances: Float[np.ndarray, " output"]) -> Row:
    if len(chances) < DEPTH + 1:
        return {"tokens": 0.0, "steps": 0.0, "first": 0.0, "places": 0}
    windows = np.lib.stride_tricks.sliding_window_view(chances, DEPTH)
    told = covered(windows)
    return {"tokens": told.tokens, "steps": told.steps, "first": float(windows[:, 0].sum()), "places": len(windows)}


def openings(data: Path, domains: Sequence[str], count: int, tokenizer: Any) -> dict[str, list[list[int]]]:
    """The first tokens of texts of each domain, drawn from all that are long enough.

    Raises:
        InputError: A domain has too few texts.
    """
    if tokenizer is None:
        raise InputError("there is no tokenizer beside the target, so no text can be read; put one into its folder")
    opened: dict[str, set[tuple[int, ...]]] = {domain: set() for domain in domains}
    for record in records(data):
        domain, text = record.fields.get("domain"), record.fields.get("text")
        if domain in opened and isinstance(text, str):
            tokens = tokenizer(text[:OPENING])["input_ids"][:PROMPT]
            if len(tokens) == PROMPT:
                opened[domain].add(tuple(tokens))
    for domain, found in opened.items():
        if len(found) < count:
            raise InputError(
                f"{data} has {len(found)} different openings of {PROMPT} tokens of the domain {domain!r}, and "
                f"{count} are needed; give more text, --domains or --requests"
            )
    drawn = {}
    for domain, found in opened.items():
        texts = sorted(found)
        chosen = np.random.default_rng(0).permutation(len(texts))[:count].tolist()
        drawn[domain] = [list(texts[i]) for i in chosen]
    return drawn


def outsider(place: Path, data: Path, domains: Sequence[str], steps: int, tokenizer: Any) -> Path:
    """A draft model that has learnt the texts of all other domains by their own tokens; its folder.

    Args:
        place: The folder. A model that an earlier run has trained there is not trained again.
        domains: What it must not have read.
        steps: Optimizer steps of 16 rows.

    Raises:
        InputError: There is no text of another domain.
    """
    if (place / "config.json").is_file():
        return place
    texts = [each for each in read_documents(data, tokenizer, max_tokens=LENGTH) if each.domain not in domains]
    if not texts:
        raise InputError(f"{data} has no text of another domain than {', '.join(domains)}; leave out --text-steps")
    return draft_of_text(place, texts, short_run(0, steps, 16, LENGTH, 3e-3), SHAPE)


def sums_of(
    rows: Sequence[Row], temperature: int, domain: str | None = None, part: int | None = None, parts: int = PARTS
) -> Sums:
    """Sums of both draft models at a temperature: over all requests, or those of a domain, or of a part of a domain.

    Args:
        part: Which of `parts` equal parts of a domain's requests, in the order in which they came.
    """
    kept = [row for row in rows if row["temperature"] == temperature and domain in (None, row["category"])]
    count = 1 + max((row["place"] for row in kept), default=0)
    flat = []
    for row in kept:
        # A prompt has another place with each seed. What is not in the part counts nothing.
        counts = part is None or row["place"] * parts // count == part
        head = {name: row[name] for name in ("prompt", "seed", "category")}
        flat += [head | {"method": arm} | {name: counts * value for name, value in row[arm].items()} for arm in ARMS]
    return Sums(flat, crossed=True)


def acceptance(sums: Sums, arm: str) -> Float[np.ndarray, " samples"]:
    """Acceptance rate: the mean over all places of the outputs, with its bootstrap."""
    return sums.ratio(arm, "first", "places")


def rise(sums: Sums) -> IntervalEstimate:
    """By how much the acceptance rate of the draft model that learns is higher."""
    return IntervalEstimate.of(acceptance(sums, LEARNING) - acceptance(sums, FROZEN))


def table(rows: Sequence[Row], domains: Sequence[str], temperature: int) -> Table:
    """Acceptance at the begin and at the end of each domain, and gains."""
    lines: list[Sequence[object]] = []
    for domain in domains:
        line: list[object] = [domain]
        for part in (0, PARTS - 1):
            sums = sums_of(rows, temperature, domain, part)
            line += [IntervalEstimate.of(acceptance(sums, arm)).text(".3f") for arm in ARMS] + [rise(sums).text("+.3f")]
        whole = sums_of(rows, temperature, domain)
        line += [rise(whole).text("+.3f")]
        line += [IntervalEstimate.of(whole.ratio(arm, "tokens", "steps")).text(".3f") for arm in ARMS]
        line += [gain(*(whole.ratio(arm, "tokens", "steps") for arm in (LEARNING, FROZEN))).text("+.1f")]
        lines.append(line)
    head = ["domain"]
    for which in ("first quarter", "last quarter"):
        head += [f"{FROZEN}, {which}", f"{LEARNING}, {which}", f"gain, {which}"]
    head += ["gain, all", f"tokens per step, {FROZEN}", f"tokens per step, {LEARNING}", "gain in tokens per step, %"]
    return Table(title=f"Acceptance rate over the stream, temperature {temperature}", head=head, lines=lines)


def claims(rows: Sequence[Row], domains: Sequence[str]) -> list[Claim]:
    """Whether learning raises acceptance on a domain, over its last quarter and over all of its requests."""
    found = []
    for temperature in TEMPERATURES:
        for domain in domains:
            for part, when in ((PARTS - 1, "in the last quarter of its requests"), (None, "over all its requests")):
                sums = sums_of(rows, temperature, domain, part)
                claim = PAPER.claim(
                    f"Learning from the stream accepts more tokens: {domain}, {when}, temperature {temperature}.",
                    rise(sums),
                    num_prompts=sums.num_prompts // (1 if part is None else PARTS),
                    published=PUBLISHED,
                    unit="acceptance rate",
                    least=0.0,
                    note="each request is judged with the weights that the requests before it have taught",
                    rests_on=ARMS,
                )
                found.append(claim)
    return found


@options.with_fields(Stream)
def main(stream: Stream) -> None:
    """Serve the stream and compare."""
    use_threads(stream.threads)
    with folder(stream.out, "online", stream.depends_on) as place:
        tokenizer = open_tokenizer(stream.place)
        asked = openings(stream.data, stream.names, stream.requests, tokenizer)
        draft = stream.draft_model(tokenizer)
        model = open_model(stream.place, dtype=torch.float32, device="cpu").requires_grad_(False).eval()

        def run(way: Label, seed: Label) -> Row:
            waves = list(stream.waves(asked, seed.value))
            with task(f"{way.name}, {seed.name}", len(waves), "waves") as bar:
                found = stream.served(asked, draft, way.value, seed.value, model, bar.advance)
            return {"method": way.name, "temperature": way.value, "seed": seed.value, **found}

        rows = over_seeds(place, "served", Label.each(TEMPERATURES, "temperature-{}"), stream.seeds, run)
        place.finish(
            Findings(
                tables=[table(rows, stream.names, t) for t in TEMPERATURES],
                claims=claims(rows, stream.names),
                text=_about(place.rows, stream),
            )
        )


def _about(runs: Sequence[Row], stream: Stream) -> str:
    rounds, rollbacks = ([run[name] for run in runs] for name in ("rounds", "rollbacks"))
    return (
        f"{stream.requests} requests of each domain, prompts of {PROMPT} tokens, outputs of at most "
        f"{stream.max_new_tokens}, chains of {DEPTH}. One optimizer step after each {stream.interval} requests, "
        f"learning rate {stream.learning_rate:g}; {min(rounds)} to {max(rounds)} steps in a stream. Older "
        f"weights came back {min(rollbacks)} to {max(rollbacks)} times. {stream.seeds} seeds. Both draft models are "
        f"judged on the same outputs. The acceptance rate is the mean over all places of the outputs of the chance "
        f"that a draft token there is accepted."
    )
