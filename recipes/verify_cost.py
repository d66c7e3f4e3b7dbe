"""Measure the cost of verifying at a large vocabulary: target rows and verifier, as a share of the target's forward.

The target is a Llama of about 1B parameters with random weights in bfloat16. Its forward, the plain model call on
prepared tensors behind a context in its cache, takes turns with every verifier of the catalog in every round. Each
verifier judges its own kind of tree. The drafter knows the target's logits up to some noise. Rows are float32 and
either nearly flat ("random": logits are standard normal) or "peaked" (Zipf-like, about 2 nats).

`python -m recipes verify_cost --out DIR` writes one row per timing. A share is the seconds of `to_rows` and `verify`
divided by the seconds of the forward in the same round; its median and quartiles are over the rounds.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np
import torch
import typer
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from outrider.bench.evidence import IntervalEstimate, Row
from outrider.bench.folder import Folder, folder
from outrider.bench.plot import Bars
from outrider.bench.report import Findings, Table
from outrider.bench.turns import Turn, turns
from outrider.catalog import make
from outrider.catalog import rows as catalog_rows
from outrider.core.dice import PhiloxDice
from outrider.core.sampling import to_rows
from outrider.core.types import Draft, Frontier, Guess, InputError, Request, Running, Sampling
from outrider.lengths.fixed import FixedLength
from outrider.trees.grow import grow
from outrider.trees.protocol import Tree
from outrider.verifiers.protocol import Verifier
from recipes import options
from recipes.bare import Bare, random_llama
from recipes.quartiles import quartiles, spread

Kind = Literal["random", "peaked"]

KINDS: tuple[Kind, ...] = ("random", "peaked")
ZIPF = 1.75
"""Exponent of the peaked rows."""
NOISE = 0.3
"""Standard deviation of the drafter's logits around the target's."""
QUICK = {"vocab": 4096, "hidden": 128, "layers": 2, "context": 16, "batches": "1,2", "rounds": 2}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A verifier with a kind of tree and its depth."""

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
    """The cases whose verifier and tree are in the catalog; others are left out."""
    verifiers, trees = catalog_rows("verifier"), catalog_rows("tree")
    return [c for c in CASES if c.verifier in verifiers and c.tree.partition(":")[0] in trees]


def target_logits(kind: Kind, count: int, vocab: int, seed: int = 0) -> Float[Tensor, "count vocab"]:
    """Raw logits of one kind."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, vocab, generator=generator)
    if kind == "peaked":
        falling = -ZIPF * torch.arange(1, vocab + 1, dtype=torch.float32).log()
        for row in logits:
            row.mul_(NOISE).add_(falling[torch.randperm(vocab, generator=generator)])
    return logits


@dataclass(frozen=True, kw_only=True)
class Near:
    """A drafter that knows the target's logits of each request's nodes, by number, up to noise."""

    logits: Float[Tensor, "requests nodes vocab"]

    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess:
        """Logits after the roots."""
        slots = np.array([state.slot for state in states])
        return self._guess(slots, np.zeros_like(slots))

    def expand(self, states: Sequence[Running], frontier: Frontier) -> Guess:
        """Logits after other nodes."""
        return self._guess(np.array([states[owner].slot for owner in frontier.owners]), frontier.nodes)

    def _guess(self, slots: Int[np.ndarray, " n"], nodes: Int[np.ndarray, " n"]) -> Guess:
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
        states.append(Running(request=request, tokens=[1], slot=slot, drafter=None))
    dice = PhiloxDice(seeds=list(range(count)), steps=[0] * count)
    return grow(near, cast(Tree, make("tree", tree)), length, states, [depth] * count, dice, torch.device("cpu"))


def big_llama(vocab: int, hidden: int, layers: int) -> PreTrainedModel:
    """A random Llama in bfloat16 with the proportions of a 1B model."""
    heads = max(hidden // 64, 1)
    return random_llama(
        vocab=vocab,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=max(heads // 4, 1),
        intermediate=4 * hidden,
        context=4096,
    )


def bare_forward(model: PreTrainedModel, requests: int, nodes: int, context: int) -> Callable[[], float]:
    """A call that times the model's forward of `nodes` tokens per request behind `context` tokens of each."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (requests, max(context, nodes)), generator=generator)
    bare = Bare(model, ids, context)
    return lambda: bare.forward(nodes)


def verifying(case: Case, near: Near, draft: Draft, sampling: Sampling) -> Callable[[int], Row]:
    """A call that times one verification. Its number is the step, on which every draw depends."""
    verifier = cast(Verifier, make("verifier", case.verifier))
    requests = draft.num_requests
    owners = np.repeat(np.arange(requests), np.diff(draft.offsets))

    def no_prefix() -> Any:
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


@dataclass(frozen=True, kw_only=True)
class Call:
    """The forward, or a verification: a function from the number of the round to its row."""

    name: str
    go: Callable[[int], Row]


@dataclass(frozen=True, kw_only=True)
class Circumstance:
    """The number of requests, the rows and the settings of timings."""

    requests: int
    kind: Kind
    sampling: str

    @property
    def name(self) -> str:
        """Unique among the circumstances."""
        return f"{self.requests} requests, {self.kind} logits, {self.sampling}"


def calls(near: Near, sampling: Sampling, forward: Callable[[], float], depth: int | None, seed: int) -> list[Call]:
    """The forward, and every case on a draft of its own kind of tree."""
    cases = known_cases()
    torch.manual_seed(seed)
    shapes = {(c.tree, min(c.depth, depth or c.depth)) for c in cases}
    drafts = {shape: draft_of(near, *shape, sampling) for shape in sorted(shapes)}
    found = [Call(name="forward", go=lambda _: {"forward_seconds": forward()})]
    for case in cases:
        draft = drafts[case.tree, min(case.depth, depth or case.depth)]
        found.append(Call(name=f"{case.verifier} on {case.tree}", go=verifying(case, near, draft, sampling)))
    return found


def measure(
    place: Folder,
    model: PreTrainedModel,
    *,
    vocab: int,
    nodes: int,
    context: int,
    batches: Sequence[int],
    rounds: int,
    depth: int | None = None,
    seed: int = 0,
) -> list[Row]:
    """All timings, after one warm-up of each call. `depth` limits the depth of every tree."""
    rows: list[Row] = []
    for requests in batches:
        forward = bare_forward(model, requests, nodes, context)
        for kind in KINDS:
            near = Near(logits=target_logits(kind, requests * nodes, vocab).view(requests, nodes, vocab))
            for name, sampling in SAMPLINGS.items():
                where = Circumstance(requests=requests, kind=kind, sampling=name)
                ways = calls(near, sampling, forward, depth, seed)
                for way in ways:
                    way.go(0)

                def timed(turn: Turn[Call, Circumstance]) -> Row:
                    return {**vars(turn.job), **turn.way.go(turn.round + 1)}

                todo = turns(ways, [where], rounds=rounds, seed=f"{seed}/{where.name}")
                rows += place.take("timings", todo, timed)
    return rows


def count_timings(batches: int, rounds: int) -> int:
    """The number of rows that `measure` gives."""
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


def findings(entries: Sequence[Mapping[str, Any]], about: str) -> Findings:
    """The summary as a table and bars."""
    head = (
        "verifier",
        "tree",
        "nodes",
        "requests",
        "sampling",
        "logits",
        "rows ms",
        "verify ms",
        "forward ms",
        "share, %",
    )
    lines = []
    for e in entries:
        rows, verify, forward = (e[f"{part}_seconds"]["median"] * 1e3 for part in ("rows", "verify", "forward"))
        place = [e["verifier"], e["tree"], f"{e['nodes']:.0f}", e["requests"], e["sampling"], e["kind"]]
        lines.append([*place, f"{rows:.1f}", f"{verify:.1f}", f"{forward:.0f}", quartiles(e["share"], scale=100)])
    return Findings(
        tables=[Table(head=head, lines=lines)],
        panels=bars(entries),
        text=about,
        summary={"entries": list(entries)},
    )


def bars(entries: Sequence[Mapping[str, Any]]) -> list[Bars]:
    """Shares of the forward, one panel per batch size and sampling."""
    found = []
    names = sorted({(e["verifier"], e["tree"].partition(":")[0]) for e in entries})
    for requests, sampling in sorted({(e["requests"], e["sampling"]) for e in entries}):
        groups: dict[str, Sequence[IntervalEstimate]] = {}
        for kind in KINDS:
            shares = {
                (e["verifier"], e["tree"].partition(":")[0]): e["share"]
                for e in entries
                if (e["requests"], e["sampling"], e["kind"]) == (requests, sampling, kind)
            }
            groups[f"{kind} logits"] = [
                IntervalEstimate(**{end: 100 * shares[name][part] for end, part in ENDS.items()}) for name in names
            ]
        title = f"{requests} request{'s' if requests > 1 else ''}, {sampling}"
        labels = [f"{verifier} on {tree}" for verifier, tree in names]
        found.append(Bars(title=title, x="% of the target's forward", names=labels, groups=groups))
    return found


ENDS = {"value": "median", "low": "low", "high": "high"}
"""An estimate's names for the parts of a spread."""


@torch.inference_mode()
def run(
    out: Path | None,
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
) -> list[dict[str, Any]]:
    """Measure, write and return an entry per verifier, tree, batch, kind of rows and sampling."""
    arguments = {name: list(value) if name == "batches" else value for name, value in locals().items()}
    if hidden % 64:
        raise InputError(f"hidden must be a multiple of 64, got {hidden}")
    torch.set_num_threads(threads)
    with folder(out, "verify_cost", arguments) as place:
        model = big_llama(vocab, hidden, layers)
        rows = measure(
            place,
            model,
            vocab=vocab,
            nodes=nodes,
            context=context,
            batches=batches,
            rounds=rounds,
            depth=depth,
            seed=seed,
        )
        entries = summarise(rows)
        about = (
            f"Target: Llama of {model.num_parameters() / 1e9:.2f}B random parameters in bfloat16, {nodes} tokens per "
            f"request behind {context}; vocabulary {vocab}, rows in float32, {rounds} rounds. Shares are of the "
            "forward; median [quartiles]."
        )
        place.finish(findings(entries, about))
        return entries


def main(
    out: options.Out = None,
    vocab: Annotated[int, typer.Option(min=2, help="Size of the vocabulary.")] = 131072,
    hidden: Annotated[int, typer.Option(min=64, help="Width of the target, a multiple of 64.")] = 2048,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the target.")] = 16,
    nodes: Annotated[int, typer.Option(min=1, help="Tokens per request in the forward.")] = 64,
    context: Annotated[int, typer.Option(min=0, help="Tokens of each request in the cache.")] = 128,
    batches: Annotated[str, typer.Option(help="Numbers of requests, with commas between them.")] = "1,8",
    rounds: options.Rounds = 7,
    threads: options.Threads = 2,
    seed: Annotated[int, typer.Option(help="Of drafts and orders.")] = 0,
) -> None:
    """Measure target rows and verifiers against the forward of a 1B target."""
    given: dict[str, Any] = locals()
    run(**given | {"batches": options.whole_numbers("--batches", batches)})
