"""What ships with a target, at batch 1: Outrider beside transformers' own `use_mtp`, assistants and DFlash.

`python -m recipes published --out DIR` makes random targets of one size, with multi-token-prediction layers (GLM-4 MoE,
Mellum) or with an assistant (Gemma 4, Muse Glimmer). Both libraries draft equally many tokens per step with the same
weights, greedily, in turns, and their outputs are compared. A time is that of the steps between the first and the last,
per token, so that loading and the prompt do not count: transformers loads the layers anew in every call.
"""

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModel, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

import outrider
from outrider.bench.evidence import Row
from outrider.bench.folder import folder
from outrider.bench.report import Findings, Table
from outrider.bench.turns import Turn, turns
from outrider.decoding.protocol import Cycle
from outrider.engine.engine import Engine
from outrider.host.threads import use_threads
from outrider.lm.hf.assistant import open_assistant
from outrider.lm.hf.mtp import behind_pattern
from outrider.lm.hf.open import open_model
from recipes import options
from recipes.label import Label
from recipes.published_pairs import NUM_ASSISTANT_TOKENS, Size, gemma4, mtp_target, muse_glimmer
from recipes.quartiles import extremes

QUICK = {"hidden_size": 32, "layers": 2, "vocab": 64, "rounds": 1, "max_new_tokens": 12}
NUM_DRAFTED = NUM_ASSISTANT_TOKENS
"""Draft tokens of a step."""
PROMPT = 32
"""Tokens of a prompt."""
HiddenSize = Annotated[int, typer.Option(min=32, help="Width of the targets' hidden states, a multiple of 32.")]
Layers = Annotated[int, typer.Option(min=2, help="Decoder layers of the targets, an even number.")]
Vocab = Annotated[int, typer.Option(min=32, help="Tokens that the targets know.")]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A target with what is published beside it.

    Attributes:
        name: Unique among the pairs.
        target: The target.
        engine: Outrider over them.
        generate: What `target.generate` gets, so that transformers drafts with the same.
    """

    name: str
    target: PreTrainedModel
    engine: Engine
    generate: Mapping[str, object]


@dataclass(kw_only=True)
class Marks:
    """When a run was how long; grows."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def add(self, tokens: int) -> None:
        """A step has come to its end."""
        self.seconds.append(time.monotonic())
        self.tokens.append(tokens)

    @property
    def row(self) -> Row:
        """What is kept of a run."""
        tokens, seconds = self.tokens[-1] - self.tokens[0], self.seconds[-1] - self.seconds[0]
        steps = len(self.tokens) - 1
        return {"tokens": tokens, "seconds": seconds, "steps": steps, "ms": 1000 * seconds / max(1, tokens)}


class Marking(StoppingCriteria):  # type: ignore[misc]
    """Stops nothing, and marks every step."""

    def __init__(self, marks: Marks) -> None:
        self.marks = marks

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        """Whether to stop, for each text."""
        self.marks.add(input_ids.shape[1])
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def by_transformers(pair: Pair, prompt: Sequence[int], tokens: int) -> tuple[list[int], Marks]:
    """Generate with transformers."""
    marks = Marks()
    made = pair.target.generate(
        torch.tensor([list(prompt)]),
        max_new_tokens=tokens,
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([Marking(marks)]),
        **pair.generate,
    )
    return made[0, len(prompt) :].tolist(), marks


def by_outrider(pair: Pair, prompt: Sequence[int], tokens: int) -> tuple[list[int], Marks]:
    """Generate with Outrider."""
    marks = Marks()

    def watch(cycle: Cycle) -> None:
        marks.add(len(cycle.states[0].tokens))

    pair.engine.rest()
    pair.engine.watch = watch
    [out] = pair.engine.generate([list(prompt)], max_new_tokens=tokens, sampling=outrider.Sampling(temperature=0))
    return out.tokens, marks


LIBRARIES = (Label("transformers", by_transformers), Label("outrider", by_outrider))


def pairs(size: Size, place: Path, dtype: str) -> list[Pair]:
    """All pairs, made in a folder."""

    def pair(name: str, target: PreTrainedModel, drafter: str, drafted: int, **generate: object) -> Pair:
        engine = outrider.load(target, drafter=drafter, length=f"fixed:{drafted}", max_slots=1, forward="eager")
        return Pair(name=name, target=target, engine=engine, generate=generate)

    found = []
    for family, layers in (("glm4_moe", 1), ("glm4_moe", NUM_DRAFTED), ("mellum", 1)):
        name = f"{family}, {layers} MTP {'layer' if layers == 1 else 'layers'}"
        target = open_model(str(mtp_target(family, size, place / name, num_mtp_layers=layers)), dtype=dtype)
        # transformers knows the places of published layers alone.
        known = target._keys_to_ignore_on_load_unexpected or ()
        target._keys_to_ignore_on_load_unexpected = {*known, behind_pattern(target)}
        found.append(pair(name, target, "mtp", layers, use_mtp=True))
    own_target, own = gemma4(size, place / "gemma4")
    target = open_model(str(own_target), dtype=dtype)
    assistant = open_assistant(str(own), dtype=getattr(torch, dtype), device=target.device)
    found.append(pair("gemma4, assistant", target, str(own), NUM_DRAFTED, assistant_model=assistant))
    target, own = muse_glimmer(size, place / "muse_glimmer", block_size=NUM_DRAFTED + 1)
    block = AutoModel.from_pretrained(own, dtype=getattr(torch, dtype)).eval()
    target = target.to(getattr(torch, dtype))
    found.append(
        pair("muse_glimmer, DFlash", target, str(own), NUM_DRAFTED, assistant_model=block, speculation_type="dflash")
    )
    return found


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """For each pair: milliseconds per token of both libraries, tokens per step, and how many times faster ours is."""
    found = {}
    for name in sorted({row["pair"] for row in rows}):
        own = {library.name: _by_round(rows, name, library.name) for library in LIBRARIES}
        both = [(own["transformers"][k]["ms"], each["ms"]) for k, each in own["outrider"].items()]
        found[name] = {
            "ms": {library: extremes([row["ms"] for row in runs.values()]) for library, runs in own.items()},
            "tokens per step": {
                library: statistics.mean(row["tokens"] / max(1, row["steps"]) for row in runs.values())
                for library, runs in own.items()
            },
            "ratio": extremes([theirs / ours for theirs, ours in both]),
            "same": all(row["same"] for runs in own.values() for row in runs.values()),
        }
    return found


def _by_round(rows: Sequence[Row], pair: str, library: str) -> dict[int, Row]:
    return {row["round"]: row for row in rows if (row["pair"], row["library"]) == (pair, library)}


def findings(found: Mapping[str, Any], rounds: int) -> Findings:
    """The summary as a table."""
    lines = [
        [
            name,
            *(each["ms"][library.name].text() for library in LIBRARIES),
            *(f"{each['tokens per step'][library.name]:.2f}" for library in LIBRARIES),
            each["ratio"].text(),
            "yes" if each["same"] else "no",
        ]
        for name, each in found.items()
    ]
    names = [library.name for library in LIBRARIES]
    head = ("pair", *(f"{name}, ms per token" for name in names), *(f"{name}, tokens per step" for name in names))
    table = Table(head=(*head, "ours is faster by", "same output"), lines=lines)
    text = f"In turns: median [lowest, highest] of {rounds}; ratios within a round."
    summary = {name: {"ratio": asdict(each["ratio"]), "same": each["same"]} for name, each in found.items()}
    return Findings(tables=[table], text=text, summary=summary)


def main(
    out: options.Out = None,
    hidden_size: HiddenSize = 256,
    layers: Layers = 8,
    vocab: Vocab = 8192,
    rounds: options.Rounds = 5,
    max_new_tokens: options.MaxNewTokens = 96,
    threads: options.Threads = 2,
    dtype: options.Dtype = "float32",
) -> dict[str, Any]:
    """Time what ships with targets, by both libraries."""
    size = Size(hidden=hidden_size, layers=layers, vocab=vocab)
    use_threads(threads)
    arguments = {**asdict(size), "max_new_tokens": max_new_tokens, "threads": threads, "dtype": dtype, "rounds": rounds}
    dice = torch.Generator().manual_seed(0)
    prompts = torch.randint(size.vocab, (rounds, PROMPT), generator=dice).tolist()
    with tempfile.TemporaryDirectory() as place, folder(out, "published", arguments) as kept:
        jobs = pairs(size, Path(place), dtype)
        expected: dict[tuple[str, int], list[int]] = {}
        for job in jobs:
            for library in LIBRARIES:
                library.value(job, prompts[0], min(8, max_new_tokens))

        def one(turn: Turn[Label, Pair]) -> Row:
            tokens, marks = turn.way.value(turn.job, prompts[turn.round], max_new_tokens)
            same = expected.setdefault((turn.job.name, turn.round), tokens) == tokens
            return {"library": turn.way.name, "pair": turn.job.name, "same": same, **marks.row}

        found = summarise(kept.take("measured", turns(LIBRARIES, jobs, rounds=rounds), one))
        kept.finish(findings(found, rounds))
    return found
