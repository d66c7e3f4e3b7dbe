"""Exported drafters in vLLM, llama.cpp and OpenVINO: the same tokens as without them, and Outrider's acceptance.

`python -m recipes in_vllm --environments DIR` exports the draft model and the head that ship with Outrider, and a head
of every kind that vLLM knows, trained here for a minute on what the target says to these very prompts. Each engine
decodes the same prompts at temperature 0, without and with each drafter. An engine's environment is made when it is
missing. If that fails, or an engine refuses a drafter, the recipe says why and goes on.

Outrider drafts the same chains: of a fixed length, from the same token on; `outrider plan` predicts them. Where the
forward of the prompt says the first token without a draft, as in vLLM, Outrider gets that token with the prompt. A
difference of numbering, of a norm or of a position shows as fewer tokens per step than in Outrider.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from transformers import PreTrainedModel

import outrider
from outrider import catalog
from outrider.bench.engines.driver import DriverRequest, Options
from outrider.bench.engines.engine import DRAFT_MODEL, PeerEngine, converted
from outrider.bench.engines.environments import CannotMake
from outrider.bench.engines.process import Process, Refused, Stopped
from outrider.bench.evidence import Row
from outrider.bench.folder import folder
from outrider.bench.report import Findings, Table
from outrider.bench.side_by_side.peers import OUTSIDE, usual_folder
from outrider.bench.turns import turns
from outrider.bench.workloads.workload import PROMPTS
from outrider.core.types import InputError, Sampling
from outrider.drafters.traits import exports_of
from outrider.embedded import EMBEDDED_DRAFT, EMBEDDED_HEAD, EMBEDDED_TARGET
from outrider.handoff.export import export
from outrider.handoff.order import ExportRequest
from outrider.heads.objective import HeadContext, HeadObjective
from outrider.learning.batch import Document
from outrider.lm.hf.open import open_tokenizer
from outrider.plan.prediction import expected_steps
from outrider.plan.recording import record
from outrider.plan.ways import DraftConfiguration
from outrider.training.data.batches import Batches
from outrider.training.loop.steps import train
from recipes import options
from recipes.questions import questions
from recipes.trained import embedded_target, short_run

DEPTH = 5
"""Draft tokens of a step."""
NUM_ROWS = 8
"""Rows of a step of training."""
GREEDY = Sampling(temperature=0.0)
SAME = {name: engine for name, engine in OUTSIDE.items() if engine.weights is None}
"""The engines that keep the target's weights: others draft for another model."""
QUICK = {"engines": "vllm", "heads": "medusa", "num_prompts": 2, "max_new_tokens": 24, "steps": 4}


@dataclass(frozen=True, kw_only=True)
class Drafter:
    """A drafter in an engine, as what takes turns.

    Attributes:
        engine: The engine's name.
        label: What tables call it.
        head: The catalog's name.
        mode: How the engine's driver decodes with it.
        shipped: Where it lies; None: it is trained here.
    """

    engine: str
    label: str
    head: str
    mode: str
    shipped: Path | None = None

    @property
    def name(self) -> str:
        """Unique among the drafters."""
        return f"{self.engine}: {self.label}"


@dataclass(frozen=True, kw_only=True)
class Said:
    """What an engine decoded, in how many steps, and how many of its draft tokens were accepted.

    Attributes:
        steps: Forwards of the target that verify drafts, summed over outputs.
    """

    tokens: Sequence[Sequence[int]]
    steps: int
    drafted: int
    accepted: int


LEARNERS: Mapping[str, Mapping[str, Any]] = {
    "medusa": {},
    "eagle": {"unrolled": 3, "decay": 1.0, "noise": 0.0},
    "eagle3": {"unrolled": DEPTH},
    "dflash": {"layers": 2, "block_size": DEPTH + 1},
    "jetspec": {"layers": 2, "block_size": DEPTH + 1},
    "dflash2": {"layers": 2, "block_size": DEPTH + 1, "selector_rank": 32},
    "dspark": {"layers": 2, "block_size": DEPTH, "markov_rank": 32},
}
"""What each head is told in training."""
EMBEDDED = "embedded eagle"
DRAFTERS = (DRAFT_MODEL, EMBEDDED, *LEARNERS)
"""Names of drafters."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is compared."""

    environments: Annotated[
        Path, typer.Option(help="Folder of the engines' environments, several GB.", show_default=False)
    ] = usual_folder()  # noqa: RUF009
    out: options.Out = None
    engines: Annotated[str, typer.Option(help="Names with commas.")] = ",".join(SAME)
    heads: Annotated[str, typer.Option(help="Drafters: names with commas.")] = ",".join(DRAFTERS)
    prompts: options.Prompts = PROMPTS
    num_prompts: options.NumPrompts = 8
    max_new_tokens: options.MaxNewTokens = 96
    steps: options.Steps = 60
    dtype: Annotated[str, typer.Option(help="What both compute in: bfloat16 or float32.")] = "float32"
    threads: options.Threads = 2


def learner(name: str, target: PreTrainedModel) -> HeadObjective:
    """A fresh head of a target that guesses `DEPTH` tokens."""
    spec = catalog.rows("drafter")[name].kind
    context = HeadContext(target=target, tokenizer=open_tokenizer(str(EMBEDDED_TARGET)), depth=DEPTH)
    found: HeadObjective = spec.learner(spec.options(divergence="fkl", **LEARNERS[name]), context)
    return found


def write_head(name: str, plan: Plan, documents: Sequence[Document], place: Path) -> None:
    """Train a head on these documents, and write it."""
    longest = max(len(each.tokens) for each in documents)
    batches = Batches(documents, batch_size=NUM_ROWS, max_length=longest, seed=0)
    train(learner(name, embedded_target()), batches, short_run(0, plan.steps, NUM_ROWS, longest, 1e-3), place)


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a comparison begins: behind the first token, if the other engine emits it when it reads the prompt.

    A drafter that reads hidden states drafts nothing in the first step of a request. So that step emits the first token
    and is not counted. For other drafters the first token is a part of the prompt.

    Attributes:
        prompts: What requests begin with.
        new_tokens: Tokens of each output.
        uncounted: Steps at the beginning of each output that are not counted, and tokens that they emit.
    """

    prompts: Sequence[Sequence[int]]
    new_tokens: int
    uncounted: int = 0

    @classmethod
    def of(cls, drafter: str, plan: Plan, prompts: Sequence[list[int]], plain: Said, first: int) -> "Start":
        """The beginning for a drafter, where `first` tokens are emitted when the prompt is read."""
        if loaded(plan, drafter).parts.drafter.taps:
            return cls(prompts=prompts, new_tokens=plan.max_new_tokens, uncounted=first)
        begun = [[*prompt, *output[:first]] for prompt, output in zip(prompts, plain.tokens, strict=True)]
        return cls(prompts=begun, new_tokens=plan.max_new_tokens - first)


def loaded(plan: Plan, drafter: str) -> outrider.Engine:
    """Outrider with chains of `DEPTH` tokens."""
    return outrider.load(
        str(EMBEDDED_TARGET), drafter=drafter, length=f"fixed:{DEPTH}", dtype=plan.dtype, device="cpu", probe=False
    )


def here(plan: Plan, drafter: str, start: Start) -> Said:
    """The same in Outrider."""
    prompts = [list(prompt) for prompt in start.prompts]
    made = loaded(plan, drafter).generate(prompts, max_new_tokens=start.new_tokens, sampling=GREEDY, ignore_eos=True)
    return Said(
        tokens=[out.tokens[start.uncounted :] for out in made],
        steps=sum(out.num_steps - start.uncounted for out in made),
        drafted=sum(out.num_draft_tokens for out in made),
        accepted=sum(out.num_accepted_tokens for out in made),
    )


def planned(plan: Plan, drafter: str, start: Start) -> float:
    """The tokens per step that `outrider plan` predicts: the target answers alone, and the drafter guesses along."""
    engine = loaded(plan, drafter)
    prompts = [list(prompt) for prompt in start.prompts]
    drafters = {drafter: engine.parts.drafter}
    found = record(engine, drafters, prompts, sampling=GREEDY, max_new_tokens=start.new_tokens, depth=DEPTH)
    way = DraftConfiguration(drafter=drafter, verifier="token", length=DEPTH, widths=(1,) * DEPTH)
    steps = expected_steps(found, way)
    left_out = start.uncounted * len(prompts)
    tokens = sum(each.tokens for each in steps) - left_out
    return tokens / (float(sum(each.by_length.sum() for each in steps)) - left_out)


def there(plan: Plan, prompts: Sequence[list[int]], mode: str, drafter: Path | None, engine: PeerEngine) -> Said:
    """What another engine decodes, in a process of its own. Its steps are those with a draft, or 0 if it tells none.

    Raises:
        CannotMake: There is no such engine.
        Stopped: It ended, which is how it refuses a drafter.
        Refused: It failed while it decoded.
    """
    room = engine.environment.ready(plan.environments) if engine.environment else None
    target, draft = (
        converted(engine, room, place, plan.environments, plan.dtype) if engine.convert else place.absolute()
        for place in (EMBEDDED_TARGET, drafter or EMBEDDED_TARGET)
    )
    given = Options(
        mode=mode,
        target=str(target),
        draft=str(draft),
        dtype=plan.dtype,
        threads=plan.threads,
        draft_tokens=DEPTH,
        ngram=3,
        batch=len(prompts),
        context=max(map(len, prompts)) + plan.max_new_tokens + 2 * (DEPTH + 1),
        counts=mode != engine.plain,
    )
    with Process(engine.command(room)) as driver:
        driver.start(given)
        made = driver.ask(DriverRequest(prompts=list(prompts), new_tokens=plan.max_new_tokens, temperature=0.0, seed=0))
    return Said(
        tokens=made.tokens,
        steps=made.counts.get("drafts", 0),
        drafted=made.counts.get("draft_tokens", 0),
        accepted=made.counts.get("accepted_tokens", 0),
    )


def written(drafter: Drafter, plan: Plan, prompts: Sequence[list[int]], plain: Said, place: Path) -> Path:
    """The folder of a drafter: the one that ships with Outrider, or a head that is trained here."""
    if drafter.shipped is not None:
        return drafter.shipped
    documents = [
        Document(tokens=np.array([*prompt, *output]), start=len(prompt))
        for prompt, output in zip(prompts, plain.tokens, strict=True)
    ]
    write_head(drafter.head, plan, documents, place)
    return place


def compared(
    drafter: Drafter, plan: Plan, prompts: Sequence[list[int]], plain: Said, engine: PeerEngine, place: Path
) -> Row:
    """One drafter in both engines."""
    given = f"{drafter.head}:path={written(drafter, plan, prompts, plain, place / 'trained')}"
    exported = exported_to(engine, given, "auto" if drafter.shipped else plan.dtype, place / "exported")
    first = int(engine.digests_first)
    start = Start.of(given, plan, prompts, plain, first)
    ours = here(plan, given, start)
    row: Row = {"engine": engine.title, "head": drafter.label, "ours": counted(ours)}
    row["planned"] = planned(plan, given, start)
    try:
        theirs = there(plan, prompts, drafter.mode, exported, engine)
    except (CannotMake, Stopped, Refused) as error:
        return row | {"refused": str(error)}
    equal = sum(list(a) == list(b) for a, b in zip(theirs.tokens, plain.tokens, strict=True))
    told = counted(theirs)
    return row | {"theirs": told | {"tokens": told["tokens"] - first * len(prompts)}, "equal": equal}


def exported_to(engine: PeerEngine, drafter: str, dtype: str, place: Path) -> Path:
    """The folder of a drafter as `outrider export` writes it for an engine. One that was written before stays.

    Args:
        dtype: Of its weights; `auto` is the target's own, which is that of what ships with Outrider.
    """
    if not place.exists():
        order = ExportRequest(
            to=engine.exports or "transformers",
            target=str(EMBEDDED_TARGET),
            drafter=drafter,
            out=place,
            dtype=dtype,
            num_speculative_tokens=DEPTH,
            measure=False,
        )
        export(order)
    return place


def counted(said: Said) -> Row:
    """What is kept of an engine's run: tokens and steps, and draft tokens beside them."""
    tokens = sum(map(len, said.tokens))
    return {"tokens": tokens, "steps": said.steps, "drafted": said.drafted, "accepted": said.accepted}


def rate(counts: Row | None) -> float | None:
    """Tokens per step. They compare engines better than shares of draft tokens: vLLM drafts beyond the last token.

    Example:
        >>> rate({"tokens": 9, "steps": 4}), rate(None), rate({"tokens": 9, "steps": 0})
        (2.25, None, None)
    """
    return None if counts is None or not counts["steps"] else counts["tokens"] / counts["steps"]


def shown_rate(value: float | None) -> str:
    """A rate in a table."""
    return "-" if value is None else f"{value:.2f}"


def findings(plan: Plan, rows: Sequence[Row], engines: Sequence[PeerEngine], missing: Mapping[str, str]) -> Findings:
    """A line for each drafter in each engine; what an engine refuses, with its reason."""
    lines = []
    for row in rows:
        ours, theirs = rate(row["ours"]), rate(row.get("theirs"))
        apart = "-" if ours is None or theirs is None else f"{theirs / ours - 1:+.1%}"
        equal = f"{row['equal']} of {plan.num_prompts}" if "equal" in row else "-"
        told = [shown_rate(each) for each in (theirs, ours, row["planned"])]
        lines.append([row["engine"], row["head"], equal, *told, apart])
    head = ("engine", "drafter", "outputs as without it", "tokens per step there", "in Outrider", "planned", "apart")
    tables = [Table(head=head, lines=lines)]
    if refused := [[row["engine"], row["head"], row["refused"]] for row in rows if "refused" in row]:
        tables.append(Table(title="Refused", head=("engine", "drafter", "what it says"), lines=refused))
    if missing:
        tables.append(Table(title="Left out", head=("engine", "why"), lines=list(map(list, missing.items()))))
    text = (
        f"Drafters for the embedded target, heads trained in {plan.steps} steps on the outputs of {plan.num_prompts} "
        f"prompts, drafts of {DEPTH} tokens, {plan.max_new_tokens} tokens at temperature 0 in {plan.dtype}. "
        f"{'; '.join(f'{each.title}: {each.version}' for each in engines)}."
    )
    return Findings(tables=tables, text=text)


@contextmanager
def kept(out: Path | None) -> Iterator[Path]:
    """A folder for the heads: beside the rows, or for a while."""
    if out is not None:
        yield out / "heads"
        return
    with tempfile.TemporaryDirectory() as place:
        yield Path(place)


def drafters_of(name: str, engine: PeerEngine, wanted: Sequence[str]) -> list[Drafter]:
    """What an engine is tried with: the pair that ships with Outrider, and in vLLM the heads too."""
    found = [Drafter(engine=name, label=DRAFT_MODEL, head="model", mode=DRAFT_MODEL, shipped=EMBEDDED_DRAFT)]
    if engine.loads_heads:
        found.append(Drafter(engine=name, label=EMBEDDED, head="eagle", mode="eagle", shipped=EMBEDDED_HEAD))
        for head in LEARNERS:
            method = exports_of(catalog.rows("drafter")[head].kind).method(engine.exports or name)
            found.append(Drafter(engine=name, label=head, head=head, mode=str(method)))
    return [each for each in found if each.label in wanted]


def run(plan: Plan, engines: Mapping[str, PeerEngine] = SAME) -> Findings:
    """Write drafters, decode with each in both engines, and say what was found."""
    heads, asked = options.words(plan.heads), options.words(plan.engines)
    for what, names, known in (("drafter", heads, DRAFTERS), ("engine", asked, tuple(engines))):
        if unknown := [name for name in names if name not in known]:
            raise InputError(f"unknown {what} {unknown[0]!r}; available: {', '.join(known)}")
    torch.set_num_threads(plan.threads)
    with folder(plan.out, "in_vllm", vars(plan)) as place, kept(plan.out) as room:
        first = outrider.load(str(EMBEDDED_TARGET), drafter="none")
        longest = first.parts.target.max_context - plan.max_new_tokens - 2 * (DEPTH + 1)
        chosen = questions(plan.prompts, plan.num_prompts, encode=first.encode, longest=longest)
        prompts = [list(question.tokens) for question in chosen]
        plain: dict[str, Said] = {}
        missing: dict[str, str] = {}
        for name in asked:
            engine = engines[name]
            try:
                plain[name] = there(plan, prompts, engine.plain, None, engine)
            except (CannotMake, Stopped, Refused) as error:
                missing[engine.title] = f"does not run here, so nothing was compared: {error}"
        ways = [each for name in plain for each in drafters_of(name, engines[name], heads)]

        def turn(each: Any) -> Row:
            way: Drafter = each.way
            return compared(way, plan, prompts, plain[way.engine], engines[way.engine], room / way.engine / way.label)

        jobs = [Drafter(engine="", label="prompts", head="", mode="")]
        rows = place.take("drafters", list(turns(ways, jobs)), turn)
        found = findings(plan, rows, [engines[name] for name in asked], missing)
        place.finish(found)
        return found


@options.with_fields(Plan)
def main(plan: Plan) -> None:
    """Let other engines draft with what was written here."""
    run(plan)
