"""Measure what a tree of tokens costs: one `LanguageModel.extend` over it, relative to the bare causal forward.

The models are the embedded target and a random Llama of about 110M parameters, in bfloat16, behind two contexts. A
chain, a binary tree and a random recursive tree of n nodes, root included, are compared with the plain transformers
call over n tokens. That call has a prepared `DynamicCache` that is cropped after each call. The bare forward is the
faster of two calls: one without a mask, one with an explicit causal mask and positions. All of them take turns in every
round.

`python -m recipes tree_cost --out DIR` writes one row per timing. A ratio has two timings of the same round; its median
and quartiles are over the rounds. The promise is that a tree of 32 nodes costs at most 1.15 times the bare forward of
32 tokens.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from jaxtyping import Int
from transformers import PreTrainedModel

from outrider.bench.evidence import IntervalEstimate, Row
from outrider.bench.folder import Folder, folder
from outrider.bench.plot import Curve, Panel
from outrider.bench.report import Findings, Table
from outrider.bench.turns import Turn, turns
from outrider.embedded import EMBEDDED_TARGET
from outrider.lm.hf.open import open_model
from outrider.lm.model import LanguageModel
from outrider.lm.protocol import Segment
from recipes import options
from recipes.bare import Bare, random_llama, seconds
from recipes.quartiles import quartiles, spread

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
CONTEXTS = (128, 900)
TREES = ("chain", "binary", "random")
BARE = ("bare, no mask", "bare, causal mask")
PROMISE = 1.15
"""Highest allowed cost of a tree of 32 nodes, in bare forwards of 32 tokens."""
QUICK = {"contexts": "32", "sizes": "2,8", "rounds": 2}


def parents_of(tree: str, count: int, seed: int = 0) -> Int[np.ndarray, " count"] | None:
    """Parents of the nodes of a tree whose root is node 0; None for a chain.

    Example:
        >>> parents_of("binary", 6)
        array([-1,  0,  0,  1,  1,  2])
    """
    if tree == "chain":
        return None
    numbers = np.arange(count)
    if tree == "binary":
        return np.where(numbers > 0, (numbers - 1) // 2, -1)
    drawn = np.random.default_rng(seed).integers(0, np.maximum(numbers, 1))
    return np.where(numbers > 0, drawn, -1)


@dataclass(frozen=True, kw_only=True)
class Call:
    """A way to make a forward, and its seconds."""

    name: str
    go: Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Place:
    """The context behind which forwards run, and their number of tokens."""

    model: str
    context: int
    nodes: int

    @property
    def name(self) -> str:
        """Unique among the places."""
        return f"{self.model}, {self.nodes} nodes behind {self.context}"


def tree_forward(
    lm: LanguageModel, slot: int, tokens: Int[torch.Tensor, " nodes"], parents: Int[np.ndarray, " nodes"] | None
) -> Callable[[], float]:
    """A call that times `extend` over a tree and then drops the tree."""

    def go() -> float:
        segment = Segment(slot=slot, tokens=tokens, parents=parents)
        spent = seconds(lambda: lm.extend([segment]), lm.device)
        lm.commit({slot: []})
        return spent

    return go


def calls(lm: LanguageModel, slot: int, ids: Int[torch.Tensor, "one tokens"], where: Place, seed: int) -> list[Call]:
    """Both bare forwards, and a forward over each kind of tree."""
    bare = Bare(lm.model, ids, where.context)
    tokens = ids[0, : where.nodes].contiguous()
    trees = [Call(name=tree, go=tree_forward(lm, slot, tokens, parents_of(tree, where.nodes, seed))) for tree in TREES]
    ways = (lambda: bare.forward(where.nodes), lambda: bare.masked(where.nodes))
    return [*(Call(name=name, go=go) for name, go in zip(BARE, ways, strict=True)), *trees]


def measure(
    folder: Folder,
    models: Mapping[str, PreTrainedModel],
    *,
    contexts: Sequence[int],
    sizes: Sequence[int],
    rounds: int,
    seed: int = 0,
) -> list[Row]:
    """All timings, after one warm-up of each call."""
    rows: list[Row] = []
    for name, model in models.items():
        lm = LanguageModel(model, max_slots=1, max_context=max(contexts) + max(sizes))
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(lm.vocab_size, (1, lm.max_context), generator=generator)
        for context in contexts:
            slot = lm.open()
            lm.extend([Segment(slot=slot, tokens=ids[0, :context], logits="none")])
            lm.commit({slot: range(context)})
            for size in sizes:
                where = Place(model=name, context=context, nodes=size)
                ways = calls(lm, slot, ids, where, seed)
                for way in ways:
                    way.go()

                def timed(turn: Turn[Call, Place]) -> Row:
                    return {**vars(turn.job), "way": turn.way.name, "seconds": turn.way.go()}

                todo = turns(ways, [where], rounds=rounds, seed=f"{seed}/{where.name}")
                rows += folder.take("timings", todo, timed)
            lm.release(slot)
    return rows


def summarise(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One entry per model, context, size and tree; ratios are relative to the bare forward with the lower median."""
    timings: dict[tuple[str, int, int], dict[str, list[float]]] = {}
    for row in rows:
        ways = timings.setdefault((row["model"], row["context"], row["nodes"]), {})
        ways.setdefault(row["way"], []).append(row["seconds"])
    entries = []
    for (model, context, nodes), ways in timings.items():
        bare = min(BARE, key=lambda way: statistics.median(ways[way]))
        for tree in TREES:
            ratios = [ours / theirs for ours, theirs in zip(ways[tree], ways[bare], strict=True)]
            entries.append(
                {
                    "model": model,
                    "context": context,
                    "nodes": nodes,
                    "tree": tree,
                    "bare": bare,
                    "bare_seconds": spread(ways[bare]),
                    "tree_seconds": spread(ways[tree]),
                    "ratio": spread(ratios),
                    "num_rounds": len(ratios),
                }
            )
    return entries


def findings(entries: Sequence[Mapping[str, Any]], rounds: int) -> Findings:
    """The summary as a table and panels."""
    by_place: dict[tuple[str, int, int], dict[str, Mapping[str, Any]]] = {}
    for e in entries:
        by_place.setdefault((e["model"], e["context"], e["nodes"]), {})[e["tree"]] = e
    lines = []
    for (model, context, nodes), by_tree in by_place.items():
        first = by_tree[TREES[0]]
        ratios = [quartiles(by_tree[tree]["ratio"], ".3f") for tree in TREES]
        bare = f"{first['bare_seconds']['median'] * 1e3:.2f}"
        lines.append([model, context, nodes, bare, first["bare"][6:], *ratios])
    table = Table(head=("model", "context", "nodes", "bare ms", "bare way", *TREES), lines=lines)
    text = (
        f"bfloat16, {rounds} rounds. Cells: `extend` over the tree / bare forward of as many tokens, median "
        f"[quartiles]. {promise(entries)}"
    ).strip()
    return Findings(tables=[table], panels=panels(entries), text=text, summary={"entries": list(entries)})


def promise(entries: Sequence[Mapping[str, Any]]) -> str:
    """Whether the promise is kept, if it was measured."""
    asked = [e for e in entries if e["nodes"] == 32]
    if not asked:
        return ""
    worst = [e for e in asked if e["ratio"]["median"] > PROMISE]
    found = ", ".join(f"{e['model']} {e['tree']} at {e['context']}: {e['ratio']['median']:.3f}" for e in worst)
    return f"32 nodes for at most {PROMISE} bare forwards: {'missed by ' + found if worst else 'kept'}."


def panels(entries: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """Ratios over sizes, one panel per model and context."""
    found = []
    for model, context in sorted({(e["model"], e["context"]) for e in entries}):
        curves = []
        for tree in TREES:
            line = [e for e in entries if (e["model"], e["context"], e["tree"]) == (model, context, tree)]
            ratios = [e["ratio"] for e in line]
            y = [IntervalEstimate(value=r["median"], low=r["low"], high=r["high"]) for r in ratios]
            curves.append(Curve(label=tree, x=[e["nodes"] for e in line], y=y))
        title = f"{model}, context {context}"
        found.append(Panel(title=title, x="nodes", y="extend / bare forward", curves=curves, line=PROMISE))
    return found


@torch.inference_mode()
def run(
    out: Path | None,
    models: Mapping[str, PreTrainedModel] | None = None,
    *,
    contexts: Sequence[int] = CONTEXTS,
    sizes: Sequence[int] = SIZES,
    rounds: int = 25,
    threads: int = 2,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Measure, write and return an entry per model, context, size and tree.

    Args:
        models: By name; None means the embedded target and a random Llama of about 110M parameters.
    """
    torch.set_num_threads(threads)
    arguments = {"contexts": list(contexts), "sizes": list(sizes), "rounds": rounds, "threads": threads, "seed": seed}
    with folder(out, "tree_cost", arguments) as place:
        models = models or {
            "embedded target": open_model(str(EMBEDDED_TARGET), dtype="bfloat16", device="cpu"),
            "random 110M": random_llama(),
        }
        entries = summarise(measure(place, models, contexts=contexts, sizes=sizes, rounds=rounds, seed=seed))
        place.finish(findings(entries, rounds))
        return entries


def main(
    out: options.Out = None,
    contexts: Annotated[str, typer.Option(help="Committed tokens, with commas between them.")] = "128,900",
    sizes: Annotated[str, typer.Option(help="Numbers of nodes, with commas between them.")] = "1,2,4,8,16,24,32,48,64",
    rounds: options.Rounds = 25,
    threads: options.Threads = 2,
    seed: Annotated[int, typer.Option(help="Of trees and orders.")] = 0,
) -> None:
    """Measure forwards over trees against bare causal forwards."""
    run(
        out,
        contexts=options.whole_numbers("--contexts", contexts),
        sizes=options.whole_numbers("--sizes", sizes),
        rounds=rounds,
        threads=threads,
        seed=seed,
    )
