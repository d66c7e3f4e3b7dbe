"""What a step costs beyond its bare forwards, and plain decoding against transformers' own loop.

`python -m recipes.overhead --out DIR` drafts chains of five with the embedded draft model, for the embedded target and
for the stand-in of 110 million parameters (`recipes.stand_in`), alone and in batches of 8. After each step of the
engine the bare forwards of such a step are made: the plain model call, on prepared tensors of the very same shapes,
behind a transformers cache as long as the engine's is in the middle of the run. So everything is timed side by side.

- overhead: 1 - bare forwards / step, both of the same moment; median and quartiles over steps.
- efficiency: speedup over plain steps of the same engine, over what the bare forwards would allow.
- plain decoding and `model.generate` take turns on the same prompts; a decoding rate is that of the tokens after the
  first, from the median of what a run of many tokens takes longer than one of one.

The bare forwards pay for transformers' cache, which is copied at every step, and not for the engine's.
"""

import copy
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TextIO

import torch
import typer
from jaxtyping import Int
from rich.progress import Progress
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import outrider
from outrider import InputError, Sampling, Step
from outrider.decoding.progress import PREFILL_CHUNK
from outrider.lm.open import DTYPES, open_model, open_tokenizer
from outrider.lm.packed import packed
from outrider.load import EMBEDDED_DRAFT, EMBEDDED_TARGET
from outrider.metrics import efficiency
from recipes.record import circumstances, write
from recipes.report import COLUMNS, table
from recipes.speed import PARTS, Row, read_prompts, spread
from recipes.stand_in import PARAMETERS, num_parameters, stand_in
from recipes.trial import PROMPTS, Out, Threads

GAMMA = 5
GREEDY = Sampling(temperature=0, seed=0)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured.

    Attributes:
        context: Tokens before the first measured step.
        steps: Steps of each run.
        repeats: Runs of steps, and rounds of decoding.
        contexts: Prompt lengths for plain decoding.
        new_tokens: Tokens of each run of plain decoding.
    """

    out: Path
    batch_sizes: tuple[int, ...] = (1, 8)
    context: int = 128
    steps: int = 24
    repeats: int = 5
    contexts: tuple[int, ...] = (128, 900)
    new_tokens: int = 48
    parameters: int = PARAMETERS
    dtype: str = "bfloat16"
    threads: int = 2
    compile: bool = False
    prepack: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InputError(f"unknown dtype {self.dtype!r}; available: {', '.join(DTYPES)}")
        for name in ("context", "steps", "repeats", "parameters", "threads"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.new_tokens < 2:
            raise InputError(f"new_tokens must be >= 2, got {self.new_tokens}")

    def load(self, model: PreTrainedModel, **parts: Any) -> outrider.Engine:
        """An engine, compiled or packed if that is asked for."""
        return outrider.load(model, compile=self.compile, prepack=self.prepack, **parts)


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """How long a call takes, the device's work included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


class Bare:
    """The plain call of a model over a batch, behind a context that stays as long as it is."""

    def __init__(self, model: PreTrainedModel, context: Int[Tensor, "batch context"]) -> None:
        self.model, self.context, self.cache = model, context, DynamicCache(config=model.config)
        with torch.inference_mode():
            model(context, past_key_values=self.cache, use_cache=True)

    @torch.inference_mode()
    def forward(self, width: int) -> float:
        """Seconds of a forward over so many new tokens per row."""
        tokens = self.context[:, :width].contiguous()
        spent = seconds(lambda: self.model(tokens, past_key_values=self.cache, use_cache=True), self.model.device)
        self.cache.crop(-width)
        return spent


def prompts_of(texts: Sequence[int], batch: int, size: int) -> list[list[int]]:
    """So many different prompts of one length, from one long text."""
    return [[texts[(37 * i + k) % len(texts)] for k in range(size)] for i in range(batch)]


class Stepping:
    """An engine over a batch that decodes on; one step at a time."""

    def __init__(self, engine: outrider.Engine, prompts: Sequence[Sequence[int]], most: int) -> None:
        self.engine = engine
        self.ids = [engine.add(p, max_new_tokens=most, sampling=GREEDY, ignore_eos=True) for p in prompts]
        self.made: list[Step] = []
        while len(self.step()[1]) < len(self.ids):
            pass

    def step(self) -> tuple[float, list[Step]]:
        """Seconds of a step, and what it did for each request."""
        made: list[Step] = []
        spent = seconds(lambda: self.engine.step(sink=made.append), self.engine.parts.target.device)
        self.made = made
        return spent, made

    def end(self) -> None:
        for id in self.ids:
            self.engine.cancel(id)
        self.engine.rest()


def profile(plan: Plan, pair: str, batch: int, models: Sequence[PreTrainedModel], texts: Sequence[int]) -> list[Row]:
    """Steps of the engine, each beside its bare forwards and steps of plain decoding; one row per step.

    Args:
        models: What `_models` gives.
    """
    target, bare_target, bare_draft = models
    tokenizer = open_tokenizer(str(EMBEDDED_TARGET))
    own = {"tokenizer": tokenizer, "max_slots": batch}
    drafting = plan.load(target, drafter=f"model:path={EMBEDDED_DRAFT}", length=f"fixed:{GAMMA}", **own)
    plains = {f"plain {pad}": plan.load(target, drafter="none", pad_to=pad, **own) for pad in (1, 2)}
    prompts = prompts_of(texts, batch, plan.context)
    # Those that are digested first decode while the others still are.
    most = (plan.steps + 1 + batch * (1 + plan.context // PREFILL_CHUNK)) * (GAMMA + 1) + 1
    middle = torch.tensor(prompts_of(texts, batch, plan.context + plan.steps)).to(target.device)
    as_run = packed if plan.prepack else lambda model: model
    bare = {"target": Bare(as_run(bare_target), middle), "draft": Bare(as_run(bare_draft), middle)}
    rows: list[Row] = []
    for repeat in range(plan.repeats + 1):
        runs = {"step": Stepping(drafting, prompts, most)}
        runs |= {name: Stepping(engine, prompts, most) for name, engine in plains.items()}
        for number in range(plan.steps):
            # After a full acceptance the draft model has two tokens to digest.
            behind = 2 if any(s.num_accepted_tokens == GAMMA for s in runs["step"].made) else 1
            spent, made = runs["step"].step()
            row: Row = {"pair": pair, "batch": batch, "repeat": repeat, "number": number, "step": spent}
            row |= {name: runs[name].step()[0] for name in plains}
            row |= {"target 1": bare["target"].forward(1), "target": bare["target"].forward(GAMMA + 1)}
            row |= {"draft 1": bare["draft"].forward(1), "draft first": bare["draft"].forward(behind)}
            row["bare"] = row["target"] + row["draft first"] + (GAMMA - 1) * row["draft 1"]
            row["tokens"] = sum(len(s.tokens) for s in made)
            row |= {f"engine {part}": getattr(made[0].timing, part) for part in PARTS}
            full = len(made) == batch and all(s.num_draft_tokens == GAMMA for s in made)
            if repeat and full:
                rows.append(row)
        for run in runs.values():
            run.end()
    return rows


def decode(
    plan: Plan, pair: str, batch: int, size: int, models: Sequence[PreTrainedModel], texts: Sequence[int]
) -> list[Row]:
    """Runs of plain decoding and of transformers in turns, of one token and of many; one row per run."""
    target, bare_target, _ = models
    own = {"tokenizer": open_tokenizer(str(EMBEDDED_TARGET)), "max_slots": batch}
    plains = {f"plain {pad}": plan.load(target, drafter="none", pad_to=pad, **own) for pad in (1, 2)}
    prompts = prompts_of(texts, batch, size)
    ids = torch.tensor(prompts).to(target.device)

    def engine(name: str, count: int) -> None:
        plains[name].generate(prompts, max_new_tokens=count, sampling=GREEDY, ignore_eos=True)
        plains[name].rest()

    def transformers(count: int) -> None:
        law = {"do_sample": False, "max_new_tokens": count, "pad_token_id": 0}
        bare_target.generate(ids, attention_mask=torch.ones_like(ids), **law)

    rows: list[Row] = []
    for round_ in range(plan.repeats + 1):
        for count in (1, plan.new_tokens):
            calls: dict[str, Callable[[], None]] = {name: lambda n=name, c=count: engine(n, c) for name in plains}
            calls["transformers"] = lambda c=count: transformers(c)
            for name, call in calls.items():
                row: Row = {"pair": pair, "batch": batch, "context": size, "way": name, "tokens": count * batch}
                row |= {"round": round_, "seconds": seconds(call, target.device)}
                if round_:
                    rows.append(row)
    return rows


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
    counts = sorted({row["tokens"] for row in rows})

    rounds = sorted({row["round"] for row in rows})

    def taken(way: str, tokens: int) -> list[float]:
        return [
            row["seconds"]
            for round_ in rounds
            for row in rows
            if (row["round"], row["way"], row["tokens"]) == (round_, way, tokens)
        ]

    def later_seconds(way: str) -> float:
        return statistics.median(
            many - one for one, many in zip(taken(way, counts[0]), taken(way, counts[1]), strict=True)
        )

    ways = sorted({row["way"] for row in rows})
    whole = {way: counts[1] / statistics.median(taken(way, counts[1])) for way in ways}
    later = {way: (counts[1] - counts[0]) / later_seconds(way) for way in ways}
    engines = ("plain 1", "plain 2")
    best = {"whole": max(engines, key=whole.__getitem__), "later": max(engines, key=later.__getitem__)}
    pairs = zip(taken("transformers", counts[1]), taken(best["whole"], counts[1]), strict=True)
    by_round = [theirs / ours for theirs, ours in pairs]
    return {
        **{name: rows[0][name] for name in ("pair", "batch", "context")},
        "tokens_per_second": whole,
        "tokens_per_second_after_the_first": later,
        "ratio": whole[best["whole"]] / whole["transformers"],
        "ratio_by_round": spread(by_round),
        "ratio_after_the_first": later[best["later"]] / later["transformers"],
    }


def to_markdown(summary: Mapping[str, Any]) -> str:
    """The summary as tables."""

    def ms(given: Mapping[str, float]) -> str:
        return f"{1e3 * given['median']:.2f} [{1e3 * given['low']:.2f}, {1e3 * given['high']:.2f}]"

    made = summary["circumstances"]
    about = (
        f"`python -m recipes.overhead`: {made['cpu']}, {made['threads']} threads, {made['arguments']['dtype']}"
        f"{', compiled' if made['arguments']['compile'] else ''}"
        f"{', packed' if made['arguments']['prepack'] else ''}; torch {made['versions']['torch']}, transformers "
        f"{made['versions']['transformers']}, outrider {made['versions']['outrider']} ({made['commit']}"
        f"{', with uncommitted changes' if made['uncommitted_changes'] else ''}); {made['date']}.\n"
        "The stand-in's costs are synthetic: the embedded target with neurons added whose outputs count nothing. "
        f"Parameters: {', '.join(f'{name} {count:,}' for name, count in summary['parameters'].items())}. Chains of "
        f"{GAMMA}. Milliseconds: medians with quartiles.\n"
    )
    head = ("pair", "batch", "steps", "step", "bare", "bare target", "bare draft", "plain step")
    head += ("overhead", "v", "c", "efficiency")
    lines = [
        [
            each["pair"],
            each["batch"],
            each["num_steps"],
            ms(each["seconds"]["step"]),
            ms(each["seconds"]["bare"]),
            ms(each["seconds"]["target"]),
            ms(each["seconds"]["draft 1"]),
            ms(each["seconds"][each["plain"]]),
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
    columns = ("pair", "batch", "context", "plain pad_to=1", "plain pad_to=2", "transformers")
    columns += ("ratio [quartiles of rounds]", "ratio after the first token")
    return "\n".join(
        [
            about,
            "## A step against its bare forwards\n",
            table(head, lines),
            "## Where the engine's own clock puts it\n",
            table(("pair", "batch", *PARTS), inside),
            "## Plain decoding against `model.generate`, tokens per second\n",
            table(
                columns,
                rates,
            ),
        ]
    )


def run(plan: Plan, pairs: Sequence[str] = ("embedded", "stand-in")) -> dict[str, Any]:
    """Measure, write `rows.jsonl`, `summary.json` and `table.md`, and return the summary."""
    torch.set_num_threads(plan.threads)
    try:
        plan.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {plan.out}: {error.strerror}; give another with --out") from error
    began = circumstances(vars(plan))
    summary: dict[str, Any] = {"circumstances": began, "parameters": {}, "steps": [], "decoding": []}
    fresh = plan.out / "rows.jsonl.new"
    with fresh.open("w", encoding="utf-8") as file, Progress(*COLUMNS) as progress:
        task = progress.add_task("measured", total=len(pairs) * len(plan.batch_sizes) * (1 + len(plan.contexts)))
        for pair in pairs:
            models = _models(plan, pair)
            texts = _texts()
            summary["parameters"][pair] = num_parameters(models[0])
            for batch in plan.batch_sizes:
                rows = profile(plan, pair, batch, models, texts)
                if not rows:
                    raise InputError("no step drafted a whole chain for every request; give more --steps")
                _keep(file, "steps", rows)
                summary["steps"].append(summary_of_steps(rows))
                progress.advance(task)
                for size in plan.contexts:
                    rows = decode(plan, pair, batch, size, models, texts)
                    _keep(file, "decoding", rows)
                    summary["decoding"].append(summary_of_decoding(rows))
                    progress.advance(task)
    fresh.replace(plan.out / "rows.jsonl")
    summary["ended"] = circumstances({})
    write(plan.out / "summary.json", json.dumps(summary, indent=2) + "\n")
    write(plan.out / "table.md", to_markdown(summary))
    return summary


def _models(plan: Plan, pair: str) -> tuple[PreTrainedModel, ...]:
    """The engines' target, and target and draft model of the bare calls; compiled engines get a target of their own."""
    model = open_model(str(EMBEDDED_TARGET)) if pair == "embedded" else stand_in(plan.parameters)
    draft = open_model(str(EMBEDDED_DRAFT), dtype=plan.dtype)
    model = model.to(draft.device, DTYPES[plan.dtype])
    bare = copy.deepcopy(model) if plan.compile else model
    # All runs go on past end tokens; transformers has no option for that.
    bare.generation_config.eos_token_id = None
    return model, bare, draft


def _texts() -> list[int]:
    """One long text from the prompts that ship with the package."""
    tokenizer = open_tokenizer(str(EMBEDDED_TARGET))
    texts = [prompt for _, _, prompt in read_prompts(PROMPTS) if isinstance(prompt, str)]
    return [token for text in texts for token in tokenizer(text)["input_ids"]]


def _keep(file: TextIO, phase: str, rows: Sequence[Row]) -> None:
    for row in rows:
        file.write(json.dumps({"phase": phase, **row}) + "\n")
    file.flush()


def main(
    out: Out,
    batch_sizes: Annotated[str, typer.Option(help="Requests at once, with commas.")] = "1,8",
    context: Annotated[int, typer.Option(help="Tokens before the first measured step.")] = 128,
    steps: Annotated[int, typer.Option(help="Steps of each run.")] = 24,
    repeats: Annotated[int, typer.Option(help="Runs of steps, and rounds of plain decoding.")] = 5,
    contexts: Annotated[str, typer.Option(help="Prompt lengths for plain decoding, with commas.")] = "128,900",
    new_tokens: Annotated[int, typer.Option(help="Tokens of each run of plain decoding.")] = 48,
    parameters: Annotated[int, typer.Option(help="Of the stand-in.")] = PARAMETERS,
    dtype: Annotated[str, typer.Option(help="What all models compute in.")] = "bfloat16",
    threads: Threads = 2,
    compile: Annotated[bool, typer.Option("--compile", help="Compile the engines.")] = False,
    prepack: Annotated[
        bool, typer.Option("--prepack", help="Pack the engines' weights, and the bare models'.")
    ] = False,
) -> None:
    """Measure what a step costs beyond its bare forwards, and plain decoding against transformers."""
    given = dict(locals())
    try:
        for name in ("batch_sizes", "contexts"):
            given[name] = tuple(int(part) for part in given[name].split(","))
    except ValueError as error:
        raise typer.BadParameter(f"--batch-sizes and --contexts must be whole numbers with commas: {error}") from error
    try:
        typer.echo(to_markdown(run(Plan(**given))))
    except InputError as error:
        raise typer.BadParameter(str(error)) from error


if __name__ == "__main__":
    typer.run(main)
