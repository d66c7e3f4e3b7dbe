"""Measure what a tree of tokens costs: one `LanguageModel.extend` over it, relative to the bare causal forward.

For the embedded target and a random Llama of about 110M parameters, in bfloat16, behind two contexts: a chain, a binary
tree and a random recursive tree of n nodes, the root among them, against the plain transformers call over as many
tokens with a prepared `DynamicCache` that is cropped back after each call. The bare forward is the faster of two ways:
without a mask, and with an explicit causal one and positions. All take turns in every round, in a shuffled order.

`python -m recipes.tree_cost --out DIR` writes `rows.jsonl` (one line per timing), `summary.json`, `table.md` and
`plot.svg`. A ratio is that of two timings of the same round; its median and quartiles are over the rounds. The promise:
a tree of 32 nodes costs at most 1.15 times the bare forward of 32 tokens.
"""

import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from jaxtyping import Int
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from outrider import InputError
from outrider.lm.model import LanguageModel
from outrider.lm.open import open_model
from outrider.lm.protocol import Segment
from outrider.load import EMBEDDED_TARGET
from recipes.record import circumstances, write
from recipes.speed import spread

Row = dict[str, Any]
"""One timing, as it stands in `rows.jsonl`."""

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
CONTEXTS = (128, 900)
TREES = ("chain", "binary", "random")
BARE = ("bare, no mask", "bare, causal mask")
PROMISE = 1.15
"""Most that a tree of 32 nodes may cost, in bare forwards of 32 tokens."""


def random_llama(
    *, hidden: int = 768, layers: int = 12, heads: int = 12, kv_heads: int = 4, vocab: int = 32000, context: int = 2048
) -> PreTrainedModel:
    """A Llama with random weights in bfloat16; by default about 110M parameters."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=hidden * 19 // 6,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


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


def bare_forwards(
    model: PreTrainedModel, ids: Int[torch.Tensor, "one tokens"], context: int, count: int
) -> dict[str, Callable[[], float]]:
    """Calls that time the plain model over the first tokens, behind as much context."""
    cache = DynamicCache(config=model.config)
    model(ids[:, :context], past_key_values=cache, use_cache=True, logits_to_keep=1)
    given = ids[:, :count].contiguous()
    mask = (torch.arange(context + count) <= torch.arange(context, context + count)[:, None])[None, None]
    explicit = {"attention_mask": mask, "position_ids": torch.arange(context, context + count)[None]}

    def timed(options: Mapping[str, torch.Tensor]) -> Callable[[], float]:
        def go() -> float:
            began = time.perf_counter()
            model(given, past_key_values=cache, use_cache=True, **options)
            spent = time.perf_counter() - began
            cache.crop(-count)
            return spent

        return go

    return {BARE[0]: timed({}), BARE[1]: timed(explicit)}


def tree_forward(
    lm: LanguageModel, slot: int, ids: Int[torch.Tensor, "one tokens"], parents: Int[np.ndarray, " count"] | None
) -> Callable[[int], float]:
    """A call that times `extend` over a tree of so many nodes; nothing of it is kept."""

    def go(count: int) -> float:
        segment = Segment(slot=slot, tokens=ids[0, :count].contiguous(), parents=parents)
        began = time.perf_counter()
        lm.extend([segment])
        spent = time.perf_counter() - began
        lm.commit({slot: []})
        return spent

    return go


def measure(
    models: Mapping[str, PreTrainedModel],
    *,
    contexts: Sequence[int],
    sizes: Sequence[int],
    rounds: int,
    seed: int = 0,
) -> Iterator[Row]:
    """All timings. A first round is thrown away."""
    for name, model in models.items():
        lm = LanguageModel(model, max_slots=1, max_context=max(contexts) + max(sizes))
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(lm.vocab_size, (1, lm.max_context), generator=generator)
        for context in contexts:
            slot = lm.open()
            lm.extend([Segment(slot=slot, tokens=ids[0, :context], logits="none")])
            lm.commit({slot: range(context)})
            for size in sizes:
                ways: dict[str, Callable[[], float]] = dict(bare_forwards(model, ids, context, size))
                for tree in TREES:
                    go = tree_forward(lm, slot, ids, parents_of(tree, size, seed))
                    ways[tree] = lambda go=go, size=size: go(size)
                shuffle = random.Random(f"{seed}/{name}/{context}/{size}").shuffle
                for round_ in range(-1, rounds):
                    order = list(ways)
                    shuffle(order)
                    for way in order:
                        seconds = ways[way]()
                        if round_ >= 0:
                            yield {
                                "model": name,
                                "context": context,
                                "nodes": size,
                                "way": way,
                                "round": round_,
                                "seconds": seconds,
                            }
            lm.release(slot)


def summarise(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One entry per model, context, size and tree; ratios are to the bare way that is faster in the median."""
    seconds: dict[tuple[str, int, int], dict[str, list[float]]] = {}
    for row in rows:
        ways = seconds.setdefault((row["model"], row["context"], row["nodes"]), {})
        ways.setdefault(row["way"], []).append(row["seconds"])
    entries = []
    for (model, context, nodes), ways in seconds.items():
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


def to_markdown(summary: Mapping[str, Any]) -> str:
    """The summary as a table."""
    made = summary["circumstances"]
    lines = [
        f"{made['cpu']}, {made['threads']} threads, load {made['load_average'][0]:.1f} to "
        f"{summary['ended']['load_average'][0]:.1f}, bfloat16; torch {made['versions']['torch']}, transformers "
        f"{made['versions']['transformers']}, outrider {made['versions']['outrider']} "
        f"({made['commit']}{', with uncommitted changes' if made['uncommitted_changes'] else ''}); {made['date']}.",
        "",
        f"{made['arguments']['rounds']} rounds. Cells: `extend` over the tree / bare forward of as many tokens, median "
        "[quartiles].",
        "",
        f"| model | context | nodes | bare ms | bare way | {' | '.join(TREES)} |",
        "|---|---|---|---|---|" + "---|" * len(TREES),
    ]
    table: dict[tuple[str, int, int], dict[str, Mapping[str, Any]]] = {}
    for e in summary["entries"]:
        table.setdefault((e["model"], e["context"], e["nodes"]), {})[e["tree"]] = e
    for (model, context, nodes), by_tree in table.items():
        first = by_tree[TREES[0]]
        cells = [by_tree[tree]["ratio"] for tree in TREES]
        lines.append(
            f"| {model} | {context} | {nodes} | {first['bare_seconds']['median'] * 1e3:.2f} | {first['bare'][6:]} | "
            + " | ".join(f"{c['median']:.3f} [{c['low']:.3f}, {c['high']:.3f}]" for c in cells)
            + " |"
        )
    worst = [e for e in summary["entries"] if e["nodes"] == 32 and e["ratio"]["median"] > PROMISE]
    if any(e["nodes"] == 32 for e in summary["entries"]):
        found = ", ".join(f"{e['model']} {e['tree']} at {e['context']}: {e['ratio']['median']:.3f}" for e in worst)
        lines += ["", f"32 nodes for at most {PROMISE} bare forwards: {'missed by ' + found if worst else 'kept'}."]
    return "\n".join(lines) + "\n"


def plot(entries: Sequence[Mapping[str, Any]], place: Path) -> None:
    """Ratios over sizes, one panel per model and context."""
    from matplotlib.figure import Figure

    panels = sorted({(e["model"], e["context"]) for e in entries})
    figure = Figure(figsize=(4 * len(panels), 3.2), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, panel in zip(axes, panels, strict=True):
        for tree in TREES:
            line = [e for e in entries if (e["model"], e["context"], e["tree"]) == (*panel, tree)]
            sizes = [e["nodes"] for e in line]
            axis.plot(sizes, [e["ratio"]["median"] for e in line], marker=".", label=tree)
            low, high = ([e["ratio"][end] for e in line] for end in ("low", "high"))
            axis.fill_between(sizes, low, high, alpha=0.15)
        axis.axhline(PROMISE, color="grey", linestyle=":")
        axis.set_title(f"{panel[0]}, context {panel[1]}", fontsize=9)
        axis.set_xlabel("nodes")
    axes[0].set_ylabel("extend / bare forward")
    axes[0].legend(fontsize=8)
    fresh = place.with_name(f"{place.name}.new")
    figure.savefig(fresh, format="svg")
    fresh.replace(place)


@torch.inference_mode()
def run(
    out: Path,
    models: Mapping[str, PreTrainedModel] | None = None,
    *,
    contexts: Sequence[int] = CONTEXTS,
    sizes: Sequence[int] = SIZES,
    rounds: int = 25,
    threads: int = 2,
    seed: int = 0,
) -> dict[str, Any]:
    """Measure, write `rows.jsonl`, `summary.json`, `table.md` and `plot.svg` to `out`, and return the summary.

    Args:
        models: By name; None means the embedded target and a random Llama of about 110M parameters.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out.mkdir(parents=True, exist_ok=True)
        arguments = {
            "contexts": list(contexts),
            "sizes": list(sizes),
            "rounds": rounds,
            "threads": threads,
            "seed": seed,
        }
        began = circumstances(arguments)
        models = models or {
            "embedded target": open_model(str(EMBEDDED_TARGET), dtype="bfloat16", device="cpu"),
            "random 110M": random_llama(),
        }
        total = len(models) * len(contexts) * len(sizes) * rounds * (len(TREES) + len(BARE))
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        fresh = out / "rows.jsonl.new"
        rows: list[Row] = []
        with fresh.open("w", encoding="utf-8") as file, Progress(*columns) as progress:
            task = progress.add_task("timings", total=total)
            for row in measure(models, contexts=contexts, sizes=sizes, rounds=rounds, seed=seed):
                rows.append(row)
                file.write(json.dumps(row) + "\n")
                progress.advance(task)
        fresh.replace(out / "rows.jsonl")
        summary = {
            "entries": summarise(rows),
            "num_parameters": {name: model.num_parameters() for name, model in models.items()},
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
    contexts: Annotated[str, typer.Option(help="Committed tokens, with commas between them.")] = "128,900",
    sizes: Annotated[str, typer.Option(help="Numbers of nodes, with commas between them.")] = "1,2,4,8,16,24,32,48,64",
    rounds: Annotated[int, typer.Option(min=1, help="Timings of everything.")] = 25,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 2,
    seed: Annotated[int, typer.Option(help="Of trees and orders.")] = 0,
) -> None:
    """Measure forwards over trees against bare causal forwards."""
    lists = {}
    for name, text in (("contexts", contexts), ("sizes", sizes)):
        if not all(part.strip().isdigit() and int(part) for part in text.split(",")):
            raise typer.BadParameter(f"--{name} must be whole numbers >= 1 with commas between them, got {text!r}")
        lists[name] = sorted({int(part) for part in text.split(",")})
    try:
        summary = run(out, contexts=lists["contexts"], sizes=lists["sizes"], rounds=rounds, threads=threads, seed=seed)
    except (InputError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(to_markdown(summary))


if __name__ == "__main__":
    typer.run(main)
