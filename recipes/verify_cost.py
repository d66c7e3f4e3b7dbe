"""Measure what verifying costs at a large vocabulary: target rows and verifier, as a share of the target's forward.

The target is a Llama of about 1B parameters with random weights in bfloat16. Its forward, the plain model call on
prepared tensors behind a context in its cache, takes turns with every verifier of the catalog in every round. Drafts
are grown by each verifier's own kind of tree from a guesser that knows the target's logits up to some noise; rows are
float32 and either nearly flat ("random": logits are standard normal) or "peaked" (Zipf-like, about 2 nats).

`python -m recipes.verify_cost --out DIR` writes `rows.jsonl` (one line per timing), `summary.json`, `table.md` and
`plot.svg`. A share is the seconds of `to_rows` and `verify` over those of the forward of the same round; its median
and quartiles are over the rounds.
"""

import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np
import torch
import typer
from jaxtyping import Float
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from outrider import InputError, Sampling
from outrider.catalog import make
from outrider.catalog import rows as catalog_rows
from outrider.dice import PhiloxDice
from outrider.lengths.fixed import FixedLength
from outrider.sampling import to_rows
from outrider.trees.grow import grow
from outrider.trees.protocol import Tree
from outrider.types import Draft, Frontier, Guess, Request, Running
from outrider.verifiers.protocol import Verifier
from recipes.record import circumstances, write
from recipes.speed import spread

Row = dict[str, Any]
"""One timing, as it stands in `rows.jsonl`."""
Kind = Literal["random", "peaked"]

KINDS: tuple[Kind, ...] = ("random", "peaked")
ZIPF = 1.75
"""Exponent of the peaked rows."""
NOISE = 0.3
"""Standard deviation of a guess around the target's logit."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A verifier with a kind of tree and how deep it grows; those that the catalog lacks are left out."""

    verifier: str
    tree: str
    depth: int


CASES = (
    Case(verifier="token", tree="chain", depth=63),
    Case(verifier="block", tree="chain", depth=63),
    Case(verifier="greedy_block", tree="chain", depth=63),
    Case(verifier="lenient", tree="chain", depth=63),
    Case(verifier="match", tree="chain", depth=63),
    Case(verifier="match", tree="dynamic:width=10,num_nodes=63", depth=8),
    Case(verifier="typical", tree="dynamic:width=10,num_nodes=63", depth=8),
    Case(verifier="recursive", tree="gumbel:branching=3x4x2x1", depth=4),
    Case(verifier="traversal", tree="gumbel:branching=3x4x2x1", depth=4),
    Case(verifier="kseq", tree="iid:num_paths=4", depth=16),
    Case(verifier="multipath", tree="iid:num_paths=4", depth=16),
    Case(verifier="top_plus_one", tree="top_plus_one:width=2", depth=5),
)
SAMPLINGS = {"T=0.8": Sampling(temperature=0.8), "T=0.8, top-p 0.95": Sampling(temperature=0.8, top_p=0.95)}


def known_cases() -> list[Case]:
    """The cases whose verifier and tree are in the catalog."""
    verifiers, trees = catalog_rows("verifier"), catalog_rows("tree")
    return [c for c in CASES if c.verifier in verifiers and c.tree.partition(":")[0] in trees]


def target_logits(kind: Kind, count: int, vocab: int, seed: int = 0) -> Float[Tensor, "count vocab"]:
    """Raw logits of a kind."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, vocab, generator=generator)
    if kind == "peaked":
        falling = -ZIPF * torch.arange(1, vocab + 1, dtype=torch.float32).log()
        for row in logits:
            row.mul_(NOISE).add_(falling[torch.randperm(vocab, generator=generator)])
    return logits


@dataclass(frozen=True, kw_only=True)
class Near:
    """A guesser that knows the target's logits of each request's nodes, by number, up to noise."""

    logits: Float[Tensor, "requests nodes vocab"]

    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess:
        slots = np.array([state.slot for state in states])
        return self._guess(slots, np.zeros_like(slots))

    def expand(self, states: Sequence[Running], frontier: Frontier) -> Guess:
        return self._guess(np.array([states[owner].slot for owner in frontier.owners]), frontier.nodes)

    def _guess(self, slots: np.ndarray, nodes: np.ndarray) -> Guess:
        here = self.logits[torch.from_numpy(slots), torch.from_numpy(nodes % self.logits.shape[1])]
        return Guess(logits=here.add_(torch.randn(here.shape), alpha=NOISE))

    def of(self, draft: Draft) -> Float[Tensor, "nodes vocab"]:
        """The target's logits after each node of a draft."""
        sizes = np.diff(draft.offsets)
        owners = np.repeat(np.arange(len(sizes)), sizes)
        nodes = np.arange(len(owners)) - draft.offsets[owners]
        return self.logits[torch.from_numpy(owners), torch.from_numpy(nodes % self.logits.shape[1])]


def draft_of(near: Near, tree: str, depth: int, sampling: Sampling) -> Draft:
    """One tree per request, grown by the project's own loop."""
    count = len(near.logits)
    length = FixedLength(num_speculative_tokens=depth)
    states = []
    for slot in range(count):
        request = Request(id=str(slot), prompt=(1,), max_new_tokens=depth + 1, sampling=sampling)
        states.append(Running(request=request, tokens=[1], slot=slot, drafter=None, length_state=length.open()))
    dice = PhiloxDice(seeds=list(range(count)), steps=[0] * count)
    return grow(near, cast(Tree, make("tree", tree)), length, states, [depth] * count, dice, torch.device("cpu"))


def big_llama(vocab: int, hidden: int, layers: int) -> PreTrainedModel:
    """A random Llama in bfloat16 with the proportions of a 1B model."""
    heads = max(hidden // 64, 1)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 4, 1),
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(usual)


def bare_forward(model: PreTrainedModel, requests: int, nodes: int, context: int) -> Callable[[], float]:
    """A call that times the model's forward of `nodes` tokens per request behind `context` tokens of each."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (requests, max(context, nodes)), generator=generator)
    cache = DynamicCache(config=model.config)
    if context:
        model(ids[:, :context], past_key_values=cache, use_cache=True, logits_to_keep=1)
    given = ids[:, :nodes].contiguous()

    def go() -> float:
        began = time.perf_counter()
        model(given, past_key_values=cache, use_cache=True)
        spent = time.perf_counter() - began
        cache.crop(-nodes)
        return spent

    return go


def verifying(case: Case, near: Near, draft: Draft, sampling: Sampling) -> Callable[[int], Row]:
    """A call that times one verification; the number is the step, which every draw depends on."""
    verifier = cast(Verifier, make("verifier", case.verifier))
    requests = draft.num_requests
    owners = np.repeat(np.arange(requests), np.diff(draft.offsets))

    def no_prefix(_: int) -> Any:
        raise AssertionError("no setting here reads a prefix")

    def go(step: int) -> Row:
        logits = near.of(draft)
        dice = PhiloxDice(seeds=list(range(requests)), steps=[step] * requests)
        began = time.perf_counter()
        rows = to_rows(logits, owners, [sampling] * requests, no_prefix)
        between = time.perf_counter()
        verdict = verifier.verify(draft, rows, dice)
        ended = time.perf_counter()
        return {
            "verifier": case.verifier,
            "tree": case.tree,
            "nodes": len(owners) / requests,
            "accepted": float(verdict.num_accepted.mean()),
            "rows_seconds": between - began,
            "verify_seconds": ended - between,
        }

    return go


def measure(
    model: PreTrainedModel,
    *,
    vocab: int,
    nodes: int,
    context: int,
    batches: Sequence[int],
    rounds: int,
    depth: int | None = None,
    seed: int = 0,
) -> Iterator[Row]:
    """All timings; `depth` makes every tree that shallow. A first round is thrown away."""
    cases = known_cases()
    for requests in batches:
        forward = bare_forward(model, requests, nodes, context)
        for kind in KINDS:
            near = Near(logits=target_logits(kind, requests * nodes, vocab).view(requests, nodes, vocab))
            for name, sampling in SAMPLINGS.items():
                torch.manual_seed(seed)
                shapes = {(c.tree, min(c.depth, depth or c.depth)) for c in cases}
                drafts = {shape: draft_of(near, *shape, sampling) for shape in sorted(shapes)}
                ways = [verifying(c, near, drafts[c.tree, min(c.depth, depth or c.depth)], sampling) for c in cases]
                shuffle = random.Random(f"{seed}/{requests}/{kind}/{name}").shuffle
                for round_ in range(-1, rounds):
                    order: list[Callable[[int], Row] | None] = [None, *ways]
                    shuffle(order)
                    for way in order:
                        row = {"forward_seconds": forward()} if way is None else way(round_ + 1)
                        if round_ >= 0:
                            yield {"requests": requests, "kind": kind, "sampling": name, "round": round_, **row}


def count_timings(batches: int, rounds: int) -> int:
    """How many rows `measure` gives."""
    return batches * len(KINDS) * len(SAMPLINGS) * rounds * (len(known_cases()) + 1)


def summarise(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One entry per verifier, tree, batch, kind of rows and sampling."""
    place = ("requests", "kind", "sampling", "round")
    forward = {tuple(r[p] for p in place): r["forward_seconds"] for r in rows if "forward_seconds" in r}
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if "verifier" in row:
            groups.setdefault(tuple(row[p] for p in (*place[:3], "verifier", "tree")), []).append(row)
    entries = []
    for (requests, kind, sampling, verifier, tree), runs in groups.items():
        base = [forward[tuple(run[p] for p in place)] for run in runs]
        shares = [(r["rows_seconds"] + r["verify_seconds"]) / f for r, f in zip(runs, base, strict=True)]
        entries.append(
            {
                "verifier": verifier,
                "tree": tree,
                "requests": requests,
                "kind": kind,
                "sampling": sampling,
                "nodes": runs[0]["nodes"],
                "accepted": statistics.mean(r["accepted"] for r in runs),
                "rows_seconds": spread([r["rows_seconds"] for r in runs]),
                "verify_seconds": spread([r["verify_seconds"] for r in runs]),
                "forward_seconds": spread(base),
                "share": spread(shares),
                "num_rounds": len(runs),
            }
        )
    return sorted(entries, key=lambda e: (e["verifier"], e["tree"], e["requests"], e["sampling"], e["kind"]))


def to_markdown(summary: Mapping[str, Any]) -> str:
    """The summary as a table."""
    made = summary["circumstances"]
    given = made["arguments"]
    lines = [
        f"{made['cpu']}, {made['threads']} threads, load {made['load_average'][0]:.1f} to "
        f"{summary['ended']['load_average'][0]:.1f}; torch {made['versions']['torch']}, transformers "
        f"{made['versions']['transformers']}, outrider {made['versions']['outrider']} "
        f"({made['commit']}{', with uncommitted changes' if made['uncommitted_changes'] else ''}); {made['date']}.",
        "",
        f"Target: Llama of {summary['num_parameters'] / 1e9:.2f}B random parameters in bfloat16, {given['nodes']} "
        f"tokens per request behind {given['context']}; vocabulary {given['vocab']}, rows in float32, "
        f"{given['rounds']} rounds. "
        "Shares are of the forward; median [quartiles].",
        "",
        "| verifier | tree | nodes | requests | sampling | logits | rows ms | verify ms | forward ms | share |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for e in summary["entries"]:
        rows, verify, forward = (e[f"{part}_seconds"]["median"] * 1e3 for part in ("rows", "verify", "forward"))
        share = e["share"]
        lines.append(
            f"| {e['verifier']} | {e['tree']} | {e['nodes']:.0f} | {e['requests']} | {e['sampling']} | {e['kind']} "
            f"| {rows:.1f} | {verify:.1f} | {forward:.0f} "
            f"| {share['median']:.2%} [{share['low']:.2%}, {share['high']:.2%}] |"
        )
    return "\n".join(lines) + "\n"


def plot(entries: Sequence[Mapping[str, Any]], place: Path) -> None:
    """Shares as bars, one panel per batch size and sampling."""
    from matplotlib.figure import Figure

    panels = sorted({(e["requests"], e["sampling"]) for e in entries})
    names = sorted({(e["verifier"], e["tree"].partition(":")[0]) for e in entries})
    figure = Figure(figsize=(4 * len(panels), 1.5 + 0.4 * len(names)), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (requests, sampling) in zip(axes, panels, strict=True):
        for i, kind in enumerate(KINDS):
            found = {
                (e["verifier"], e["tree"].partition(":")[0]): e["share"]
                for e in entries
                if (e["requests"], e["sampling"], e["kind"]) == (requests, sampling, kind)
            }
            middle = np.array([found[name]["median"] for name in names]) * 100
            low = middle - np.array([found[name]["low"] for name in names]) * 100
            high = np.array([found[name]["high"] for name in names]) * 100 - middle
            heights = np.arange(len(names)) + 0.4 * i - 0.2
            axis.barh(heights, middle, 0.38, xerr=np.stack([low, high]), label=f"{kind} logits")
        axis.set_title(f"{requests} request{'s' if requests > 1 else ''}, {sampling}", fontsize=9)
        axis.set_xlabel("% of the target's forward")
        axis.set_yticks(np.arange(len(names)), [f"{verifier} on {tree}" for verifier, tree in names])
    axes[0].legend(fontsize=8)
    fresh = place.with_name(f"{place.name}.new")
    figure.savefig(fresh, format="svg")
    fresh.replace(place)


@torch.inference_mode()
def run(
    out: Path,
    *,
    vocab: int = 131072,
    hidden: int = 2048,
    layers: int = 16,
    nodes: int = 64,
    context: int = 128,
    batches: Sequence[int] = (1, 8),
    rounds: int = 7,
    depth: int | None = None,
    threads: int = 2,
    seed: int = 0,
) -> dict[str, Any]:
    """Measure, write `rows.jsonl`, `summary.json`, `table.md` and `plot.svg` to `out`, and return the summary."""
    arguments = {name: list(v) if name == "batches" else v for name, v in locals().items()}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out.mkdir(parents=True, exist_ok=True)
        began = circumstances(arguments)
        model = big_llama(vocab, hidden, layers)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        fresh = out / "rows.jsonl.new"
        rows: list[Row] = []
        with fresh.open("w", encoding="utf-8") as file, Progress(*columns) as progress:
            task = progress.add_task("timings", total=count_timings(len(batches), rounds))
            for row in measure(
                model,
                vocab=vocab,
                nodes=nodes,
                context=context,
                batches=batches,
                rounds=rounds,
                depth=depth,
                seed=seed,
            ):
                rows.append(row)
                file.write(json.dumps(row) + "\n")
                file.flush()
                progress.advance(task)
        fresh.replace(out / "rows.jsonl")
        summary = {
            "entries": summarise(rows),
            "num_parameters": model.num_parameters(),
            "circumstances": began,
            "ended": circumstances({}),
        }
    finally:
        torch.set_num_threads(before)
    write(out / "summary.json", json.dumps(summary, indent=2) + "\n")
    write(out / "table.md", to_markdown(summary))
    plot(summary["entries"], out / "plot.svg")
    return summary


def main(
    out: Annotated[Path, typer.Option(help="Directory for rows.jsonl, summary.json, table.md and plot.svg.")],
    vocab: Annotated[int, typer.Option(min=2, help="Size of the vocabulary.")] = 131072,
    hidden: Annotated[int, typer.Option(min=64, help="Width of the target, a multiple of 64.")] = 2048,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the target.")] = 16,
    nodes: Annotated[int, typer.Option(min=1, help="Tokens per request in the forward.")] = 64,
    context: Annotated[int, typer.Option(min=0, help="Tokens of each request in the cache.")] = 128,
    batches: Annotated[str, typer.Option(help="Numbers of requests, with commas between them.")] = "1,8",
    rounds: Annotated[int, typer.Option(min=1, help="Timings of everything.")] = 7,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 2,
    seed: Annotated[int, typer.Option(help="Of drafts and orders.")] = 0,
) -> None:
    """Measure target rows and verifiers against the forward of a 1B target."""
    if not all(batch.strip().isdigit() and int(batch) for batch in batches.split(",")):
        raise typer.BadParameter(f"--batches must be whole numbers >= 1 with commas between them, got {batches!r}")
    if hidden % 64:
        raise typer.BadParameter(f"--hidden must be a multiple of 64, got {hidden}")
    try:
        summary = run(
            out,
            vocab=vocab,
            hidden=hidden,
            layers=layers,
            nodes=nodes,
            context=context,
            batches=sorted({int(batch) for batch in batches.split(",")}),
            rounds=rounds,
            threads=threads,
            seed=seed,
        )
    except (InputError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(to_markdown(summary))


if __name__ == "__main__":
    typer.run(main)
