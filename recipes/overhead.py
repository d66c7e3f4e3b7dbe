"""The cost of a step beyond its bare forwards, and plain decoding against transformers' own loop.

`python -m recipes overhead --out DIR` drafts chains of five with the embedded draft model, for the embedded target and
for the stand-in of 110 million parameters (`recipes.stand_in`), alone and in batches of 8. After each step of the
engine, the recipe runs the bare forwards of such a step: plain model calls on prepared tensors of the same shapes,
behind a transformers cache as long as the engine's cache in the middle of the run. So everything is timed side by side.

- overhead: 1 - bare forwards / step, both measured at the same moment; median and quartiles over steps.
- efficiency: the speedup over plain steps of the same engine, divided by the speedup that the bare forwards would
  allow.
- plain decoding and `model.generate` take turns on the same prompts; a decoding rate counts the tokens after the first,
  and the median time by which a run of many tokens is longer than a run of one token.

The bare forwards include the cost of transformers' cache, which is copied at every step, and exclude the cost of the
engine's.
"""

import copy
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

import torch
import typer
from transformers import PreTrainedModel

import outrider
from outrider.bench.evidence import Row
from outrider.bench.folder import folder
from outrider.bench.report import Findings, Table
from outrider.bench.side_by_side.transformers_generate import sampling_options
from outrider.bench.turns import Turn
from outrider.bench.workloads.workload import PROMPTS
from outrider.core.metrics import efficiency
from outrider.core.types import InputError, Sampling, Step
from outrider.embedded import EMBEDDED_DRAFT, EMBEDDED_TARGET
from outrider.lm.forwards.forward import as_forward
from outrider.lm.hf.open import DTYPES, open_model, open_tokenizer
from outrider.lm.slots.budget import PREFILL_CHUNK
from recipes import options
from recipes.bare import bare, seconds
from recipes.quartiles import quartiles, spread
from recipes.questions import read_prompts
from recipes.runs import PARTS
from recipes.stand_in import PARAMETERS, num_parameters, stand_in

GAMMA = 5
GREEDY = Sampling(temperature=0, seed=0)
PAIRS = ("embedded", "stand-in")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured."""

    out: options.Out = None
    batch_sizes: Annotated[str, typer.Option(help="Requests at once, with commas.")] = "1,8"
    context: Annotated[int, typer.Option(help="Tokens before the first measured step.")] = 128
    steps: Annotated[int, typer.Option(help="Steps of each run.")] = 24
    repeats: Annotated[int, typer.Option(help="Runs of steps, and rounds of plain decoding.")] = 5
    contexts: Annotated[str, typer.Option(help="Prompt lengths for plain decoding, with commas.")] = "128,900"
    new_tokens: Annotated[int, typer.Option(help="Tokens of each run of plain decoding.")] = 48
    parameters: Annotated[int, typer.Option(help="Of the stand-in.")] = PARAMETERS
    dtype: options.Dtype = "bfloat16"
    threads: options.Threads = 2
    forward: Annotated[str, typer.Option(help="How the engines' forwards run, and the bare ones.")] = "eager"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InputError(f"unknown dtype {self.dtype!r}; available: {', '.join(DTYPES)}")
        as_forward(self.forward)
        for name in ("context", "steps", "repeats", "parameters", "threads"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.new_tokens < 2:
            raise InputError(f"new_tokens must be >= 2, got {self.new_tokens}")
        self.cases("")

    def cases(self, pair: str) -> "list[Case]":
        """What is measured of a pair."""
        sizes = options.whole_numbers("--batch-sizes", self.batch_sizes)
        contexts = options.whole_numbers("--contexts", self.contexts)
        return [Case(pair=pair, batch=size, context=context) for size in sizes for context in (None, *contexts)]

    def load(self, model: PreTrainedModel, **parts: Any) -> outrider.Engine:
        """An engine whose forwards run as the plan says."""
        return outrider.load(model, forward=self.forward, **parts)


def prompts_of(texts: Sequence[int], batch: int, size: int) -> list[list[int]]:
    """Different prompts of one length, from one long text."""
    return [[texts[(37 * i + k) % len(texts)] for k in range(size)] for i in range(batch)]


class Stepping:
    """An engine whose batch decodes one step at a time."""

    def __init__(self, engine: outrider.Engine, prompts: Sequence[Sequence[int]], most: int) -> None:
        self.engine = engine
        self.ids = [engine.add(p, max_new_tokens=most, sampling=GREEDY, ignore_eos=True) for p in prompts]
        self.made: list[Step] = []
        while len(self.step()[1]) < len(self.ids):
            pass

    def step(self) -> tuple[float, list[Step]]:
        """Seconds of a step, and its result for each request."""
        made: list[Step] = []
        spent = seconds(lambda: self.engine.step(sink=made.append), self.engine.parts.target.device)
        self.made = made
        return spent, made

    def end(self) -> None:
        """Cancel the requests."""
        for id in self.ids:
            self.engine.cancel(id)
        self.engine.rest()


@dataclass(frozen=True, kw_only=True)
class Models:
    """A target and the models beside it.

    Attributes:
        target: The engines' target.
        bare_target: The target of the bare calls; another copy if the engines are compiled.
        texts: One long text to cut prompts from.
    """

    target: PreTrainedModel
    bare_target: PreTrainedModel
    bare_draft: PreTrainedModel
    texts: Sequence[int]

    @classmethod
    def of(cls, plan: Plan, pair: str) -> "Models":
        """The embedded target, or the stand-in, with the embedded draft model."""
        model = open_model(str(EMBEDDED_TARGET)) if pair == PAIRS[0] else stand_in(plan.parameters)
        draft = open_model(str(EMBEDDED_DRAFT), dtype=plan.dtype)
        model = model.to(draft.device, DTYPES[plan.dtype])
        plain = copy.deepcopy(model) if plan.forward == "compiled" else model
        # All runs continue after end tokens; transformers has no option for that.
        plain.generation_config.eos_token_id = None
        return cls(target=model, bare_target=plain, bare_draft=draft, texts=_texts())


@dataclass(frozen=True, kw_only=True)
class Case:
    """A unit of measurement: steps of a pair at a batch size, or plain decoding behind prompts of a length."""

    pair: str
    batch: int
    context: int | None = None

    @property
    def name(self) -> str:
        """Unique among the cases."""
        what = "steps" if self.context is None else f"decoding behind {self.context}"
        return f"{self.pair}, batch of {self.batch}, {what}"


def profile(plan: Plan, case: Case, models: Models) -> list[Row]:
    """Steps of the engine, each beside its bare forwards and steps of plain decoding; one row per step."""
    batch = case.batch
    own = {"tokenizer": open_tokenizer(str(EMBEDDED_TARGET)), "max_slots": batch}
    drafting = plan.load(models.target, drafter=f"model:path={EMBEDDED_DRAFT}", length=f"fixed:{GAMMA}", **own)
    plains = {f"plain {pad}": plan.load(models.target, drafter="none", pad_to=pad, **own) for pad in (1, 2)}
    prompts = prompts_of(models.texts, batch, plan.context)
    # Requests whose prefill ends early decode while the others prefill.
    most = (plan.steps + 1 + batch * (1 + plan.context // PREFILL_CHUNK)) * (GAMMA + 1) + 1
    middle = torch.tensor(prompts_of(models.texts, batch, plan.context + plan.steps)).to(models.target.device)

    target, draft = (bare(model, middle, plan.forward) for model in (models.bare_target, models.bare_draft))
    rows: list[Row] = []
    for repeat in range(plan.repeats + 1):
        runs = {"step": Stepping(drafting, prompts, most)}
        runs |= {name: Stepping(engine, prompts, most) for name, engine in plains.items()}
        for number in range(plan.steps):
            # After a full acceptance the draft model reads two tokens.
            behind = 2 if any(s.num_accepted_tokens == GAMMA for s in runs["step"].made) else 1
            spent, made = runs["step"].step()
            row: Row = {"pair": case.pair, "batch": batch, "repeat": repeat, "number": number, "step": spent}
            row |= {name: runs[name].step()[0] for name in plains}
            row |= {"target 1": target.forward(1), "target": target.forward(GAMMA + 1)}
            row |= {"draft 1": draft.forward(1), "draft first": draft.forward(behind)}
            row["bare"] = row["target"] + row["draft first"] + (GAMMA - 1) * row["draft 1"]
            row["tokens"] = sum(len(s.tokens) for s in made)
            row |= {f"engine {part}": getattr(made[0].timing, part) for part in PARTS}
            full = len(made) == batch and all(s.num_draft_tokens == GAMMA for s in made)
            if repeat and full:
                rows.append(row)
        for run in runs.values():
            run.end()
    if not rows:
        raise InputError("no step drafted a whole chain for every request; give more --steps")
    return rows


def decode(plan: Plan, case: Case, size: int, models: Models) -> list[Row]:
    """Runs of plain decoding and of transformers in turns, of one token and of many; one row per run."""
    own = {"tokenizer": open_tokenizer(str(EMBEDDED_TARGET)), "max_slots": case.batch}
    plains = {f"plain {pad}": plan.load(models.target, drafter="none", pad_to=pad, **own) for pad in (1, 2)}
    prompts = prompts_of(models.texts, case.batch, size)
    ids = torch.tensor(prompts).to(models.target.device)

    def engine(name: str, count: int) -> None:
        plains[name].generate(prompts, max_new_tokens=count, sampling=GREEDY, ignore_eos=True)
        plains[name].rest()

    def transformers(count: int) -> None:
        given = {**sampling_options(GREEDY), "max_new_tokens": count, "pad_token_id": 0}
        models.bare_target.generate(ids, attention_mask=torch.ones_like(ids), **given)

    calls: dict[str, Callable[[int], None]] = {name: partial(engine, name) for name in plains}
    calls["transformers"] = transformers
    rows: list[Row] = []
    for round_ in range(plan.repeats + 1):
        for count in (1, plan.new_tokens):
            for name, call in calls.items():
                row: Row = {"pair": case.pair, "batch": case.batch, "context": size, "way": name}
                spent = seconds(partial(call, count), models.target.device)
                row |= {"tokens": count * case.batch, "round": round_, "seconds": spent}
                if round_:
                    rows.append(row)
    return rows


def _texts() -> list[int]:
    """One long text from the prompts that ship with the package."""
    tokenizer = open_tokenizer(str(EMBEDDED_TARGET))
    if tokenizer is None:
        raise InputError(f"there is no tokenizer beside {EMBEDDED_TARGET}; put its files there")
    texts = [prompt for _, _, prompt in read_prompts(PROMPTS) if isinstance(prompt, str)]
    return [token for text in texts for token in tokenizer(text)["input_ids"]]


QUICK = {
    "batch_sizes": "1,2",
    "context": 32,
    "steps": 3,
    "repeats": 1,
    "contexts": "32",
    "new_tokens": 4,
    "parameters": 20_000_000,
}


def summary_of_steps(rows: Sequence[Row]) -> dict[str, Any]:
    """Medians with quartiles, overhead and efficiency of one pair and batch size."""
    names = ("step", "bare", "target", "target 1", "draft first", "draft 1", "plain 1", "plain 2")
    found = {name: spread([row[name] for row in rows]) for name in (*names, *(f"engine {part}" for part in PARTS))}
    middle = {name: found[name]["median"] for name in names}
    plain = min(("plain 1", "plain 2"), key=lambda name: middle[name])
    block = statistics.mean(row["tokens"] for row in rows) / rows[0]["batch"]
    speedup = block * middle[plain] / middle["step"]
    v, c = middle["target"] / middle["target 1"], middle["draft 1"] / middle["target 1"]
    return {
        "pair": rows[0]["pair"],
        "batch": rows[0]["batch"],
        "num_steps": len(rows),
        "seconds": found,
        "overhead": spread([1 - row["bare"] / row["step"] for row in rows]),
        "plain": plain,
        "block_efficiency": block,
        "speedup": speedup,
        "v": v,
        "c": c,
        "efficiency": efficiency(speedup, block, v, c, GAMMA),
    }


def summary_of_decoding(rows: Sequence[Row]) -> dict[str, Any]:
    """Rates of one pair, batch size and context, and the engine's over transformers'."""
    one, many = sorted({row["tokens"] for row in rows})
    ways = sorted({row["way"] for row in rows})
    # The rounds of a way stand in their order.
    taken = {
        (way, tokens): [row["seconds"] for row in rows if (row["way"], row["tokens"]) == (way, tokens)]
        for way in ways
        for tokens in (one, many)
    }
    whole = {way: many / statistics.median(taken[way, many]) for way in ways}
    later = {
        way: (many - one)
        / statistics.median(all_ - first for first, all_ in zip(taken[way, one], taken[way, many], strict=True))
        for way in ways
    }
    engines = ("plain 1", "plain 2")
    best = {"whole": max(engines, key=whole.__getitem__), "later": max(engines, key=later.__getitem__)}
    pairs = zip(taken["transformers", many], taken[best["whole"], many], strict=True)
    return {
        **{name: rows[0][name] for name in ("pair", "batch", "context")},
        "tokens_per_second": whole,
        "tokens_per_second_after_the_first": later,
        "ratio": whole[best["whole"]] / whole["transformers"],
        "ratio_by_round": spread([theirs / ours for theirs, ours in pairs]),
        "ratio_after_the_first": later[best["later"]] / later["transformers"],
    }


def findings(summary: Mapping[str, Any], about: str) -> Findings:
    """The summary as tables."""

    def ms(given: Mapping[str, float]) -> str:
        return quartiles(given, scale=1e3)

    head = ["pair", "batch", "steps", "step", "bare", "bare target", "bare draft", "plain step"]
    head += ["overhead", "v", "c", "efficiency"]
    lines = [
        [
            each["pair"],
            each["batch"],
            each["num_steps"],
            *(ms(each["seconds"][name]) for name in ("step", "bare", "target", "draft 1", each["plain"])),
            "{median:.1%} [{low:.1%}, {high:.1%}]".format(**each["overhead"]),
            f"{each['v']:.2f}",
            f"{each['c']:.3f}",
            f"{each['efficiency']:.1%}",
        ]
        for each in summary["steps"]
    ]
    inside = [
        [each["pair"], each["batch"], *(ms(each["seconds"][f"engine {part}"]) for part in PARTS)]
        for each in summary["steps"]
    ]
    rates = [
        [
            each["pair"],
            each["batch"],
            each["context"],
            *(f"{each['tokens_per_second'][way]:.1f}" for way in ("plain 1", "plain 2", "transformers")),
            f"{each['ratio']:.3f} [{each['ratio_by_round']['low']:.3f}, {each['ratio_by_round']['high']:.3f}]",
            f"{each['ratio_after_the_first']:.3f}",
        ]
        for each in summary["decoding"]
    ]
    columns = ["pair", "batch", "context", "plain pad_to=1", "plain pad_to=2", "transformers"]
    columns += ["ratio [quartiles of rounds]", "ratio after the first token"]
    return Findings(
        tables=[
            Table(title="A step against its bare forwards", head=head, lines=lines),
            Table(title="Where the engine's own clock puts it", head=("pair", "batch", *PARTS), lines=inside),
            Table(
                title="Plain decoding against `model.generate`, tokens per second",
                head=columns,
                lines=rates,
            ),
        ],
        text=about,
        summary=summary,
    )


def about(plan: Plan, parameters: Mapping[str, int]) -> str:
    """What was measured, and which part of it is synthetic."""
    counts = ", ".join(f"{name} {count:,}" for name, count in parameters.items())
    return (
        f"{plan.dtype}, {plan.forward}. The stand-in's costs are synthetic: the embedded target with neurons added "
        f"whose outputs count nothing. Parameters: {counts}. Chains of {GAMMA}. Milliseconds: medians with quartiles."
    )


def run(plan: Plan, pairs: Sequence[str] = PAIRS) -> dict[str, Any]:
    """Measure, write and return the summary."""
    torch.set_num_threads(plan.threads)
    steps: list[dict[str, Any]] = []
    decoding: list[dict[str, Any]] = []
    parameters: dict[str, int] = {}
    with folder(plan.out, "overhead", {**asdict(plan), "pairs": pairs}) as place:
        for pair in pairs:
            models = Models.of(plan, pair)
            parameters[pair] = num_parameters(models.target)
            cases = plan.cases(pair)

            def one(turn: Turn[Case, Case], models: Models = models) -> Row:
                case = turn.way
                if case.context is None:
                    return {"each": profile(plan, case, models)}
                return {"each": decode(plan, case, case.context, models)}

            for row, case in zip(
                place.take(pair, [Turn(round=0, way=case, job=case) for case in cases], one), cases, strict=True
            ):
                if case.context is None:
                    steps.append(summary_of_steps(row["each"]))
                else:
                    decoding.append(summary_of_decoding(row["each"]))
        summary = {"parameters": parameters, "steps": steps, "decoding": decoding}
        place.finish(findings(summary, about(plan, parameters)))
        return summary


@options.with_fields(Plan)
def main(plan: Plan) -> dict[str, Any]:
    """Measure what a step costs beyond its bare forwards, and plain decoding against transformers."""
    return run(plan)
