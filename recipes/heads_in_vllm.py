"""Heads that are written here, loaded by vLLM: it says the same tokens, and accepts as many draft tokens as Outrider.

`python -m recipes heads_in_vllm --environments DIR` writes a head of every kind that vLLM knows for the embedded
target. vLLM decodes the same prompts at temperature 0 without and with each head. The environment of vLLM is made when
it is missing. If that fails, or vLLM refuses a head, the recipe says why and goes on.

The heads are trained for a minute on what the target says to these very prompts. So most draft tokens are accepted by
an engine that computes what the head was trained to compute. A difference of numbering, of a norm or of a position
shows as fewer tokens per step in vLLM than in Outrider.
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
from outrider.bench.engines import vllm
from outrider.bench.engines.driver import Asked, Options
from outrider.bench.engines.engine import Engine
from outrider.bench.engines.environments import CannotMake
from outrider.bench.engines.process import Process, Refused, Stopped
from outrider.bench.evidence import Row
from outrider.bench.folder import folder
from outrider.bench.report import Findings, Table
from outrider.bench.side_by_side.peers import usual_folder
from outrider.bench.turns import turns
from outrider.bench.workload import PROMPTS, questions
from outrider.core.types import InputError, Sampling
from outrider.embedded import EMBEDDED_TARGET
from outrider.heads.objective import HeadContext, HeadObjective
from outrider.learning.batch import Document
from outrider.lm.hf.open import open_tokenizer
from outrider.training.data.batches import Batches
from outrider.training.loop.steps import train
from recipes import options
from recipes.trained import embedded_target, short_run

DEPTH = 5
"""Draft tokens of a step."""
NUM_ROWS = 8
"""Rows of a step of training."""
GREEDY = Sampling(temperature=0.0)
QUICK = {"heads": "medusa", "num_prompts": 2, "max_new_tokens": 24, "steps": 4}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is compared.

    Attributes:
        environments: Folder of vLLM's environment.
        heads: Names of heads, as the catalog and vLLM have them.
        steps: Optimizer steps of each head.
    """

    out: Path | None = None
    environments: Path
    heads: tuple[str, ...]
    prompts: Path = PROMPTS
    num_prompts: int = 8
    max_new_tokens: int = 96
    steps: int = 60
    dtype: str = "float32"
    threads: int = 2


@dataclass(frozen=True, kw_only=True)
class Head:
    """A head as what takes turns."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Said:
    """What an engine decoded, in how many steps, and how many of its draft tokens were accepted.

    Attributes:
        steps: Forwards of the target for each output, summed, with that of its prompt.
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
    "dspark": {"layers": 2, "block_size": DEPTH, "markov_rank": 32},
}
"""What each head is told in training."""


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


def here(plan: Plan, prompts: Sequence[list[int]], drafter: str) -> Said:
    """The same in Outrider."""
    engine = outrider.load(
        str(EMBEDDED_TARGET), drafter=drafter, length=f"fixed:{DEPTH}", dtype=plan.dtype, device="cpu"
    )
    made = engine.generate(list(prompts), max_new_tokens=plan.max_new_tokens, sampling=GREEDY, ignore_eos=True)
    return Said(
        tokens=[out.tokens for out in made],
        steps=sum(out.num_steps for out in made),
        drafted=sum(out.num_draft_tokens for out in made),
        accepted=sum(out.num_accepted_tokens for out in made),
    )


def there(plan: Plan, prompts: Sequence[list[int]], mode: str, head: Path | None, engine: Engine) -> Said:
    """What vLLM decodes, in a process of its own.

    Raises:
        CannotMake: There is no vLLM.
        Stopped: It ended, which is how it refuses a head.
        Refused: It failed while it decoded.
    """
    room = engine.environment.made(plan.environments) if engine.environment else None
    context = max(map(len, prompts)) + plan.max_new_tokens + 2 * (DEPTH + 1)
    given = Options(
        mode=mode,
        target=str(EMBEDDED_TARGET),
        draft=str(head or EMBEDDED_TARGET),
        dtype=plan.dtype,
        threads=plan.threads,
        draft_tokens=DEPTH,
        ngram=3,
        batch=len(prompts),
        context=context,
    )
    with Process(engine.command(room)) as driver:
        driver.start(given)
        made = driver.ask(Asked(prompts=list(prompts), new_tokens=plan.max_new_tokens, temperature=0.0, seed=0))
    return Said(
        tokens=made.tokens,
        steps=len(prompts) + made.counts["drafts"] if made.counts else sum(map(len, made.tokens)),
        drafted=made.counts.get("draft_tokens", 0),
        accepted=made.counts.get("accepted_tokens", 0),
    )


def compared(name: str, plan: Plan, prompts: Sequence[list[int]], plain: Said, engine: Engine, place: Path) -> Row:
    """One head in both engines."""
    documents = [
        Document(tokens=np.array([*prompt, *output]), start=len(prompt))
        for prompt, output in zip(prompts, plain.tokens, strict=True)
    ]
    write_head(name, plan, documents, place)
    ours = here(plan, prompts, f"{name}:path={place}")
    row: Row = {"head": name, "ours": counted(ours)}
    try:
        theirs = there(plan, prompts, name, place, engine)
    except (Stopped, Refused) as error:
        return row | {"refused": str(error)}
    equal = sum(list(a) == list(b) for a, b in zip(theirs.tokens, plain.tokens, strict=True))
    return row | {"theirs": counted(theirs), "equal": equal}


def counted(said: Said) -> Row:
    """What is kept of an engine's run: tokens and steps, and draft tokens beside them."""
    tokens = sum(map(len, said.tokens))
    return {"tokens": tokens, "steps": said.steps, "drafted": said.drafted, "accepted": said.accepted}


def rate(counts: Row | None) -> str:
    """Tokens per step. They compare engines better than shares of draft tokens: vLLM drafts beyond the last token.

    Example:
        >>> rate({"tokens": 9, "steps": 4}), rate(None)
        ('2.25', '-')
    """
    return "-" if counts is None else f"{counts['tokens'] / counts['steps']:.2f}"


def findings(plan: Plan, rows: Sequence[Row], engine: Engine) -> Findings:
    """A line for each head; what vLLM refuses, with its reason."""
    lines = [
        [
            row["head"],
            f"{row['equal']} of {plan.num_prompts}" if "equal" in row else "-",
            rate(row.get("theirs")),
            rate(row["ours"]),
        ]
        for row in rows
    ]
    head = ("head", "outputs as without it", f"tokens per step, {engine.title}", "tokens per step, Outrider")
    tables = [Table(head=head, lines=lines)]
    if refused := [[row["head"], row["refused"]] for row in rows if "refused" in row]:
        tables.append(Table(title="Refused", head=("head", f"what {engine.title} says"), lines=refused))
    text = (
        f"Heads for the embedded target, {plan.steps} steps on the outputs of {plan.num_prompts} prompts, drafts of "
        f"{DEPTH} tokens, {plan.max_new_tokens} tokens at temperature 0 in {plan.dtype}. {engine.title}: "
        f"{engine.version}."
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


def run(plan: Plan, engine: Engine = vllm.ENGINE) -> Findings:
    """Write heads, decode with each in both engines, and say what was found."""
    if unknown := set(plan.heads) - set(LEARNERS):
        raise InputError(f"unknown head {sorted(unknown)[0]!r}; available: {', '.join(LEARNERS)}")
    torch.set_num_threads(plan.threads)
    with folder(plan.out, "heads_in_vllm", vars(plan)) as place, kept(plan.out) as heads:
        first = outrider.load(str(EMBEDDED_TARGET), drafter="none")
        longest = first.parts.target.max_context - plan.max_new_tokens - 2 * (DEPTH + 1)
        chosen = questions(plan.prompts, plan.num_prompts, encode=first.encode, longest=longest)
        prompts = [list(question.tokens) for question in chosen]
        try:
            plain = there(plan, prompts, vllm.PLAIN, None, engine)
        except (CannotMake, Stopped, Refused) as error:
            found = Findings(tables=[], text=f"{engine.title} does not run here, so nothing was compared: {error}")
        else:
            ways = [Head(name=name) for name in plan.heads]

            def turn(each: Any) -> Row:
                return compared(each.way.name, plan, prompts, plain, engine, heads / each.way.name)

            rows = place.take("heads", list(turns(ways, [Head(name="prompts")])), turn)
            found = findings(plan, rows, engine)
        place.finish(found)
        return found


def main(
    environments: Annotated[
        Path, typer.Option(help="Folder of vLLM's environment, several GB.", show_default=False)
    ] = usual_folder(),  # noqa: B008
    out: options.Out = None,
    heads: Annotated[str, typer.Option(help="Names with commas.")] = ",".join(LEARNERS),
    prompts: options.Prompts = PROMPTS,
    num_prompts: options.NumPrompts = 8,
    max_new_tokens: options.MaxNewTokens = 96,
    steps: options.Steps = 60,
    dtype: Annotated[str, typer.Option(help="What both compute in: bfloat16 or float32.")] = "float32",
    threads: options.Threads = 2,
) -> None:
    """Let vLLM load heads that were written here."""
    run(
        Plan(
            out=out,
            environments=environments,
            heads=tuple(name.strip() for name in heads.split(",")),
            prompts=prompts,
            num_prompts=num_prompts,
            max_new_tokens=max_new_tokens,
            steps=steps,
            dtype=dtype,
            threads=threads,
        )
    )
