"""outrider prove: the verifier's exact law, the dice, the rows and greedy identity of this pair, and its samples."""

import json
import math
import sys
import time
from dataclasses import asdict, replace
from typing import Any

import typer
from rich.console import Console

from outrider.catalog import name_of
from outrider.cli.opened import check_numbers, opened
from outrider.core import progress
from outrider.core.deadline import Deadline
from outrider.core.option import Bounds
from outrider.core.types import InputError
from outrider.engine.engine import Engine
from outrider.proof.identity import Difference, Identity
from outrider.proof.nodes import Nodes
from outrider.proof.pair import Proof
from outrider.proof.pair import prove as proven
from outrider.proof.statistics import Samples
from outrider.setup import Setup


def prove(
    setup: Setup, *, num_draws: int, temperature: float | None, seed: int, time_limit: float, as_json: bool
) -> None:
    """Prove a pair and print the findings. Exit status 1 if anything fails."""
    if not time_limit > 0:
        raise InputError(f"time_limit must be > 0 seconds, got {time_limit:g}")
    Bounds(least=0).check("num_draws", num_draws)
    if temperature is not None and not 0 < temperature < math.inf:
        raise InputError(f"temperature must be > 0, because greedy outputs are not drawn, got {temperature}")
    # What is proven is the law of requests with settings of their own.
    began, until = time.monotonic(), Deadline.after(time_limit)
    with progress.shown(f"proving, for about {time_limit:g} s (--time-limit)"):
        engine = opened(replace(setup, ignore_generation_config=True))
        check_numbers(engine)
        proof = proven(engine, num_draws, temperature, seed, until)
    if as_json:
        print(json.dumps(_record(engine, proof), indent=2))
    else:
        _print(engine, proof)
        spent = f"{time.monotonic() - began:.0f} s, where {time_limit:g} s were given"
        advice = "; more with --time-limit" if proof.samples is not None and proof.samples.doubt else ""
        print(f"It took {spent}{advice}.", file=sys.stderr)
    raise typer.Exit(0 if proof.holds else 1)


def _record(engine: Engine, proof: Proof) -> dict[str, Any]:
    """The object of `--json`."""
    record: dict[str, Any] = {
        "verifier": name_of(engine.parts.verifier),
        "length": repr(engine.parts.length),
        "law_error": proof.law_error,
        "exact_law": proof.exact_law,
    }
    if (dice := proof.dice) is not None:
        record["dice"] = {
            "holds": dice.holds,
            "p_value": dice.p_value,
            "worst": dice.worst,
            "num_draws": dice.num_draws,
        }
    if proof.nodes is not None:
        record["rows"] = _nodes(proof.nodes) | {"compared": proof.compared}
    if proof.identical is not None:
        record["greedy_identical"] = _identity(proof.identical) | {"compared": proof.compared}
    if proof.up_to_ties is not None:
        record["greedy_up_to_ties"] = _identity(proof.up_to_ties) | {"dtype": _dtype(engine)}
    if proof.own_nodes is not None:
        record["rows_up_to_ties"] = _nodes(proof.own_nodes) | {"dtype": _dtype(engine)}
    if (samples := proof.samples) is not None:
        record["samples"] = asdict(samples.test) | {
            "combined_p_value": samples.p_value,
            "likely": asdict(samples.likely),
            "liked": None if samples.liked is None else asdict(samples.liked),
            "verdict": samples.verdict,
            "doubt": samples.doubt,
            "temperatures": samples.temperatures,
            "length": samples.length,
            "num_draft_tokens": samples.num_draft_tokens,
            "num_accepted_tokens": samples.num_accepted_tokens,
        }
    return record | {"errors": dict(proof.errors), "proven": proof.holds}


def _identity(identity: Identity) -> dict[str, Any]:
    return {
        "num_tokens": identity.num_tokens,
        "holds": identity.holds,
        "differences": [asdict(difference) for difference in identity.differences],
    }


def _nodes(nodes: Nodes) -> dict[str, Any]:
    return asdict(nodes) | {"holds": nodes.holds}


def _print(engine: Engine, proof: Proof) -> None:
    console = Console(highlight=False, soft_wrap=True)
    parts, dtype = engine.parts, _dtype(engine).removeprefix("torch.")
    if (error := proof.law_error) is not None:
        console.print(
            f"exact law          {_word(proof.exact_law)}  enumerated, largest error {error:.1e}"
            f" ({name_of(parts.verifier)}, {parts.length!r})"
        )
    if (dice := proof.dice) is not None:
        console.print(
            f"dice               {_word(dice.holds)}  p = {dice.p_value:.3g} over {dice.num_draws} draws; the worst of "
            f"{len(dice.p_values)} tests: {dice.worst}"
        )
    if (nodes := proof.nodes) is not None:
        console.print(f"rows               {_word(nodes.holds)}  {proof.compared}, {_compared(nodes)}")
    if (tie_nodes := proof.own_nodes) is not None:
        console.print(f"rows up to ties    {_word(tie_nodes.holds)}  {dtype}, {_compared(tie_nodes)}")
    if (greedy := proof.identical) is not None:
        console.print(f"greedy identical   {_word(greedy.holds)}  {proof.compared}, {greedy.num_tokens} tokens")
        for difference in greedy.differences:
            console.print(f"                   {_parting(difference)}")
    if (ties := proof.up_to_ties) is not None:
        console.print(f"greedy up to ties  {len(ties.differences)} differences in {ties.num_tokens} tokens ({dtype})")
        for difference in ties.differences:
            console.print(f"                   {_parting(difference)}")
    if proof.samples is not None:
        for line in _sampled(proof.samples):
            console.print(line)
    for name, reason in proof.errors.items():
        console.print(f"{name:<18} {_word(False)}  {reason}")


def _compared(nodes: Nodes) -> str:
    reused = f", {nodes.num_reused} tokens before them reused" if nodes.num_reused else ""
    return (
        f"{nodes.num_nodes} nodes of drafts in batches of mixed settings{reused}: logits as transformers' within "
        f"{nodes.logits:.1e} of their range, probabilities within {nodes.probabilities:.1e} of themselves"
    )


def _sampled(samples: Samples) -> list[str]:
    word = {"fits": "holds ", "differs": "FAILS ", "inconclusive": "inconclusive"}[samples.verdict]
    at = ", ".join(f"{temperature:g}" for temperature in dict.fromkeys(samples.temperatures))
    first = (
        f"samples            {word}  p = {samples.p_value:.3f} over the first {samples.length} tokens of "
        f"{samples.test.num_draws} outputs at temperature {at} ({samples.test.degrees} degrees of freedom)"
    )
    tilts = f"tilt towards likely tokens {samples.likely.z:+.1f} standard deviations"
    if samples.liked is not None:
        tilts += f", towards what the drafter prefers {samples.liked.z:+.1f}"
    share = f"{samples.num_accepted_tokens} of {samples.num_draft_tokens} draft tokens accepted"
    doubt = f"; {samples.doubt}" if samples.verdict == "inconclusive" else ""
    return [first, f"                   {tilts}", f"                   {share}{doubt}"]


def _dtype(engine: Engine) -> str:
    return str(getattr(engine.parts.target, "dtype", ""))


def _parting(d: Difference) -> str:
    return (
        f"prompt {d.prompt}, token {d.position}: {d.plain} plainly, {d.drafted} drafted; "
        f"logit gap {d.gap:.2g} in a row that spans {d.span:.2g}"
    )


def _word(fine: bool) -> str:
    return "holds " if fine else "FAILS "
