"""The exact law of whole runs of an engine over real models: every outcome of every draw is a run of its own."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product

import numpy as np
import torch
from jaxtyping import Float
from transformers import PreTrainedModel

from outrider.core.types import Request, Running
from outrider.engine.engine import Engine
from outrider.engine.output import Output, succeeded
from outrider.proof.enumerate import EnumeratingDice, Key, World, enumerating_dice

Row = Callable[[tuple[int, ...]], Float[np.ndarray, " vocab"]]
"""The distribution of the next token after an output."""


@dataclass(frozen=True, kw_only=True)
class Runs:
    """The result of all runs.

    Attributes:
        outputs: Probability of each joint output of a run's requests, one output per request.
        num_runs: How many runs there are.
        drafted: Expected number of draft tokens of a run.
        accepted: Expected number of accepted ones.
        error: Largest absolute difference to the law of plain decoding, in which outputs are independent.
    """

    outputs: Mapping[tuple[tuple[int, ...], ...], float]
    num_runs: int
    drafted: float
    accepted: float
    error: float


@dataclass(kw_only=True)
class _Run:
    """One run under way; changes in place.

    Attributes:
        world: The outcomes of its draws.
        ended: The outputs of its ended requests, by their numbers.
    """

    world: World
    ended: dict[int, Output] = field(default_factory=dict)


def law_of_runs(engine: Engine, requests: Sequence[Request], rows: Sequence[Row]) -> Runs:
    """Run an engine once for every way that the draws of some requests can come out, from their prompts to their ends.

    A run follows a script of outcomes, and records the outcomes that it did not take. Their scripts are run later. A
    run's probability is the product over its draws, in float64. Slots, caches, states kept and fed again, prefill and
    ends are those of production: as many runs as there are slots for go on at once, and come and go like requests.

    There are as many runs as outcomes, so this is for vocabularies of two or three and outputs of a few tokens. `law`
    goes further on tables, where it need not run a step twice that begins in the same way.

    Args:
        engine: An idle engine, whose draft lengths do not depend on other requests: runs share it, and a script must
            find the drafts that it was recorded with. Its own dice are restored at the end.
        requests: The requests of each run, which run at once; ids are set here.
        rows: What plain decoding draws each request's next token from; see `plain_rows`.

    Raises:
        ValueError: The requests of one run do not fit into the engine.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> import outrider
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=2, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...                                      num_attention_heads=2, eos_token_id=None)).double()
        >>> request = Request(id="", prompt=(0, 1, 0), max_new_tokens=3, sampling=outrider.Sampling(seed=0))
        >>> engine = outrider.load(model, drafter="ngram:prompt_lookup_min=1", length="fixed:2")
        >>> found = law_of_runs(engine, [request], [plain_rows(model, request.prompt)])
        >>> found.num_runs, len(found.outputs), found.error < 1e-6
        (8, 8, True)
    """
    if len(requests) > engine.max_slots:
        raise ValueError(f"{len(requests)} requests cannot run at once in an engine with max_slots={engine.max_slots}")
    waiting: list[dict[Key, int]] = [{}]
    running: dict[str, tuple[_Run, int]] = {}
    outputs: dict[tuple[tuple[int, ...], ...], float] = defaultdict(float)
    num_runs, drafted, accepted = 0, 0.0, 0.0

    def dice(states: Sequence[Running]) -> EnumeratingDice:
        pairs = [running[state.request.id] for state in states]
        worlds, texts = [run.world for run, _ in pairs], [i for _, i in pairs]
        steps = [(i, state.num_steps) for i, state in zip(texts, states, strict=True)]
        return enumerating_dice(engine.parts, states, worlds, steps, texts)

    before, engine.dice = engine.dice, dice
    try:
        while waiting or running:
            while waiting and len(running) + len(requests) <= engine.max_slots:
                run = _Run(world=World(script=waiting.pop()))
                for i, request in enumerate(requests):
                    running[engine.add(replace(request, id=f"{num_runs}.{i}"))] = run, i
                num_runs += 1
            for update in map(succeeded, engine.step()):
                if update.output is None:
                    continue
                run, i = running.pop(update.id)
                run.ended[i] = update.output
                if len(run.ended) == len(requests):
                    mass, ended = run.world.probability, [run.ended[i] for i in range(len(requests))]
                    outputs[tuple(tuple(output.tokens) for output in ended)] += mass
                    drafted += mass * sum(output.num_draft_tokens for output in ended)
                    accepted += mass * sum(output.num_accepted_tokens for output in ended)
                    waiting += run.world.others
    finally:
        engine.dice = before
        for id in running:
            engine.cancel(id)
    return Runs(
        outputs=dict(outputs),
        num_runs=num_runs,
        drafted=drafted,
        accepted=accepted,
        error=_error(outputs, [_plain(engine, request, row) for request, row in zip(requests, rows, strict=True)]),
    )


def plain_rows(model: PreTrainedModel, prompt: Sequence[int], temperature: float = 1.0) -> Row:
    """The softmax of a model's own logits: a forward over the whole text, alone, without a cache or a mask."""

    @cache
    def row(output: tuple[int, ...]) -> Float[np.ndarray, " vocab"]:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *output]], device=model.device), use_cache=False).logits[0, -1]
        return (logits.double() / temperature).softmax(-1).cpu().numpy()

    return row


def _plain(engine: Engine, request: Request, row: Row) -> dict[tuple[int, ...], float]:
    """The law of one request's whole output."""
    complete: dict[tuple[int, ...], float] = {}
    going: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(request.max_new_tokens):
        longer = {(*o, t): mass * p for o, mass in going.items() for t, p in enumerate(row(o).tolist()) if p}
        ended = {output for output in longer if _is_end(engine, request, output)}
        complete |= {output: longer[output] for output in ended}
        going = {output: mass for output, mass in longer.items() if output not in ended}
    return complete | going


def _is_end(engine: Engine, request: Request, output: tuple[int, ...]) -> bool:
    """Whether plain decoding ends with this output, by an end token, by `ends` or by a stop string."""
    if output[-1] in request.eos_ids or (request.ends is not None and request.ends(output)):
        return True
    text = "" if engine.tokenizer is None or not request.stop else str(engine.tokenizer.decode(list(output)))
    return any(stop in text for stop in request.stop)


def _error(
    outputs: Mapping[tuple[tuple[int, ...], ...], float], plain: Sequence[Mapping[tuple[int, ...], float]]
) -> float:
    joint = {
        tuple(output for output, _ in each): math.prod(mass for _, mass in each)
        for each in product(*(law.items() for law in plain))
    }
    return max(abs(outputs.get(key, 0.0) - joint.get(key, 0.0)) for key in joint | dict(outputs))
