"""How near `goodput` comes to the best fixed length along real texts, by measured costs and without a clock.

`python -m recipes length_texts --out DIR` decodes prompts once at each temperature, in steps that draft eight tokens
and keep one. So it knows for every place of a text how far a draft gets there. Then it simulates processes: requests go
along these texts, and a step costs what the engine's cost table says. Nothing else takes time, so a policy is judged
without the noise of a machine.

A process takes three turns. With an `empty` cache it knows the costs alone, with a `kept` one also the acceptance of
earlier processes. Drafts cost a share more than the table says (`--slower`), because tables are off by some percent,
and a draft model reads late what it missed. Speed is that of all processes of a cell together.
"""

import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer

import outrider
from outrider.bench.evidence import Row
from outrider.bench.folder import folder
from outrider.bench.report import Findings, Table
from outrider.bench.turns import Turn, turns
from outrider.bench.workloads.workload import PROMPTS
from outrider.core.types import InputError, Request, Running, Sampling, Step
from outrider.decoding.step import StepDecoding
from outrider.engine.engine import Engine
from outrider.lengths.costs import CostTable
from outrider.lengths.experience import Experience
from recipes import options
from recipes.label import Label
from recipes.length_simulation import POLICY, LearntLengths, Lengths
from recipes.never_loses import STATES, Cell, cells_of, records_in
from recipes.questions import read_prompts

TURNS = 3
"""Turns of a process."""
QUICK = {"requests": "1", "temperatures": "0", "texts": 2, "max_new_tokens": 8, "processes": 1}


@dataclass(frozen=True, kw_only=True)
class Text:
    """How far drafts get in a text.

    Attributes:
        prompt: Tokens of its prompt.
        accepted: Of a draft of eight tokens, how many are accepted at each place.
    """

    prompt: int
    accepted: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class _OneAtATime(StepDecoding):
    """Steps of which the first token alone is kept.

    Attributes:
        accepted: How many draft tokens were accepted in each step, by request.
    """

    accepted: dict[str, list[int]] = field(default_factory=dict)

    def step(self, parts: Any, states: Sequence[Running], **given: Any) -> list[Step]:
        """One cycle of every request."""
        made = super().step(parts, states, **{**given, "keep": lambda state, tokens: 1})
        for each in made:
            self.accepted.setdefault(each.request, []).append(each.num_accepted_tokens)
        return made


def recorded(engine: Engine, prompts: Sequence[Sequence[int]], temperature: float, max_new_tokens: int) -> list[Text]:
    """Decode prompts and note how far drafts get at every place.

    Args:
        engine: One that drafts chains of a fixed length.
    """
    decoding = _OneAtATime()
    watched = Engine(replace(engine.parts, decoding=decoding), tokenizer=engine.tokenizer, keep_warm=False)
    made = [
        watched.add(
            list(prompt),
            max_new_tokens=max_new_tokens + POLICY.most,
            sampling=Sampling(temperature=temperature, seed=number),
            ignore_eos=True,
        )
        for number, prompt in enumerate(prompts)
    ]
    while watched.busy:
        for update in watched.step():
            if update.output is not None and update.output.error is not None:
                raise update.output.error
    return [
        Text(prompt=len(prompt), accepted=decoding.accepted[id][:max_new_tokens])
        for prompt, id in zip(prompts, made, strict=True)
    ]


def turn_cost(texts: Sequence[Text], costs: CostTable, lengths: Lengths, cell: Cell, slower: float) -> float:
    """Seconds until every text has its tokens, all of them decoded together."""
    states = [
        Running(
            request=Request(
                id=f"{id(texts)}-{i}",
                prompt=(1,) * text.prompt,
                max_new_tokens=len(text.accepted),
                sampling=Sampling(temperature=cell.temperature, seed=0),
                repeats=cell.seeded,
            ),
            tokens=[1] * text.prompt,
            slot=i,
            drafter=None,
            length_state=POLICY.open(),
        )
        for i, text in enumerate(texts)
    ]
    missed, seconds = [text.prompt for text in texts], 0.0
    live = list(range(len(texts)))
    while live:
        own = [states[i] for i in live]
        places = [len(state.tokens) - len(state.request.prompt) for state in own]
        rooms = [len(texts[i].accepted) - place - 1 for i, place in zip(live, places, strict=True)]
        chosen = lengths.choose(own, rooms)
        longest, drafting = max(chosen), sum(length > 0 for length in chosen)
        context = sum(len(state.tokens) for state in own) // len(own)
        steps = costs.steps(len(own), sampled=cell.temperature > 0, context=context, longest=max(longest, 1))
        seconds += steps[drafting][longest] * (1 + slower * (drafting > 0))
        drafts = []
        for i, place, length in zip(live, places, chosen, strict=True):
            accepted = min(texts[i].accepted[place], length)
            drafts.append((length, accepted))
            states[i].tokens.extend([1] * (accepted + 1))
            seconds += costs.catch_up * missed[i] * (length > 0)
            missed[i] = 0 if length else missed[i] + 1
        lengths.note(own, drafts)
        live = [i for i in live if len(states[i].tokens) < texts[i].prompt + len(texts[i].accepted)]
    return seconds


def judged(
    texts: Sequence[Text], costs: CostTable, cell: Cell, state: str, *, processes: int, slower: float
) -> dict[str, Any]:
    """What the policy and each fixed length come to in a cell."""
    groups = [
        [texts[(TURNS * cell.requests * process + cell.requests * turn + i) % len(texts)] for i in range(cell.requests)]
        for process, turn in itertools.product(range(processes), range(TURNS))
    ]
    fixed = [
        sum(turn_cost(group, costs, Lengths(length), cell, slower) for group in groups)
        for length in range(POLICY.most + 1)
    ]
    own, key = 0.0, {"texts": cell.name}
    with tempfile.TemporaryDirectory() as place, records_in(place):
        # A kept cache is what a process before has left, on other texts.
        for process in range(-1 if state == "kept" else 0, processes):
            experience = Experience.recalled(costs, key) if state == "kept" else Experience(costs)
            learnt = LearntLengths(experience)
            for group in groups[TURNS * process : TURNS * process + TURNS or None]:
                spent = turn_cost(group, costs, learnt, cell, slower)
                own += spent if process >= 0 else 0.0
            experience.save()
    best = min(fixed)
    return {
        **asdict(cell),
        "state": state,
        "best": fixed.index(best),
        "gain": fixed[0] / best,
        "over_best": best / own,
        "over_plain": fixed[0] / own,
        "fixed": [fixed[0] / each for each in fixed],
    }


def findings(rows: Sequence[Row]) -> Findings:
    """A line per cell."""
    head = ("temperature", "seeds", "requests", "cache", "best length", "its gain", "over the best", "over plain")
    lines = [
        [
            f"{row['temperature']:g}",
            "yes" if row["seeded"] else "no",
            row["requests"],
            row["state"],
            row["best"],
            f"{row['gain']:.3f}",
            f"{row['over_best']:.3f}",
            f"{row['over_plain']:.3f}",
        ]
        for row in sorted(rows, key=lambda r: (r["temperature"], r["seeded"], r["requests"], r["state"]))
    ]
    over = [row["over_best"] for row in rows]
    text = (
        f"The default has {median(over):.3f} of the best fixed length's speed in the median of cells, at least "
        f"{min(over):.3f}, and at least {min(row['over_plain'] for row in rows):.3f} of plain decoding's. Simulated: "
        "texts and costs are measured, and nothing else takes time."
    )
    return Findings(tables=[Table(head=head, lines=lines)], text=text)


def main(
    out: options.Out = None,
    target: options.Target = None,
    drafter: options.Drafter = None,
    requests: options.AtOnce = "1,2,4,8",
    temperatures: options.Temperatures = "0,1",
    texts: Annotated[int, typer.Option(min=1, help="Most prompts that are decoded.")] = 40,
    max_new_tokens: options.MaxNewTokens = 96,
    processes: Annotated[int, typer.Option(min=1, help="Simulated processes of three turns each.")] = 20,
    slower: Annotated[float, typer.Option(min=0.0, help="Share by which drafts cost more than the table says.")] = 0.03,
    threads: options.Threads = 2,
) -> list[Row]:
    """Simulate goodput along real texts, with measured costs and without a clock."""
    given = {**locals(), "target": None if target is None else Path(target).name}
    counts, warmths = options.whole_numbers("--requests", requests), options.numbers("--temperatures", temperatures)
    cells = cells_of(warmths, counts)
    torch.set_num_threads(threads)
    asked: dict[str, Any] = {
        name: value for name, value in (("target", target), ("drafter", drafter)) if value is not None
    }
    with folder(out, "length_texts", given) as place:
        costs = outrider.load(**asked, max_slots=max(8, *counts)).parts.experience.costs
        if costs is None:
            raise InputError("this machine's costs are not known; run `outrider prepare` when nothing else runs")
        drafting = outrider.load(**asked, max_slots=8, length=f"fixed:{POLICY.most}")
        prompts = [drafting.encode(prompt) for _, _, prompt in read_prompts(PROMPTS)][:texts]

        def made(turn: Turn[Label, Label]) -> Row:
            found = recorded(drafting, prompts, turn.job.value, max_new_tokens)
            return {"temperature": turn.job.value, "texts": [asdict(text) for text in found]}

        jobs = Label.each(warmths, "temperature {:g}")
        known = {
            row["temperature"]: [Text(**text) for text in row["texts"]]
            for row in place.take("recorded", turns([Label("one token a step")], jobs), made)
        }

        def simulated(turn: Turn[Label, Cell]) -> Row:
            own = known[turn.job.temperature]
            return judged(own, costs, turn.job, turn.way.name, processes=processes, slower=slower)

        rows = place.take("simulated", turns(Label.each(STATES), cells), simulated)
        place.finish(findings(rows))
        return rows
