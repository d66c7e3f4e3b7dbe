"""outrider prove: the verifier's exact law, greedy identity of this pair, and a chi-square test of its samples."""

import json
import math
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console
from rich.progress import Progress

from outrider.catalog import name_of
from outrider.cli.opened import check_numbers, opened
from outrider.core.types import InputError
from outrider.engine.engine import Engine
from outrider.proof.identity import Difference, Identity
from outrider.proof.pair import Proof
from outrider.proof.pair import prove as proven
from outrider.proof.statistics import Samples
from outrider.setup import Setup


def prove(setup: Setup, *, num_draws: int, temperature: float | None, seed: int, as_json: bool) -> None:
    """Prove a pair and print the findings. Exit status 1 if anything fails."""
    if num_draws < 0:
        raise InputError(f"num_draws must be >= 0, got {num_draws}")
    if temperature is not None and not 0 < temperature < math.inf:
        raise InputError(f"temperature must be > 0, because greedy outputs are not drawn, got {temperature}")
    engine = opened(setup)
    check_numbers(engine)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with Progress(console=console, transient=True, disable=as_json) as progress:
        task = progress.add_task("proving", total=3 + num_draws)
        proof = proven(engine, num_draws, temperature, seed, lambda amount: progress.advance(task, amount))
    if as_json:
        print(json.dumps(_record(engine, proof), indent=2))
    else:
        _print(engine, proof)
    raise typer.Exit(0 if proof.holds else 1)


def _record(engine: Engine, proof: Proof) -> dict[str, Any]:
    """The object of `--json`."""
    found = {
        "verifier": name_of(engine.parts.verifier),
        "length": repr(engine.parts.length),
        "law_error": proof.law_error,
        "exact_law": proof.exact_law,
        "greedy_identical": _identity(proof.identical),
        "greedy_up_to_ties": _identity(proof.up_to_ties) | {"dtype": _dtype(engine)},
    }
    if (samples := proof.samples) is not None:
        found["samples"] = asdict(samples.test) | {
            "verdict": samples.verdict,
            "doubt": samples.doubt,
            "temperatures": samples.temperatures,
            "length": samples.length,
            "num_draft_tokens": samples.num_draft_tokens,
            "num_accepted_tokens": samples.num_accepted_tokens,
        }
    return found | {"proven": proof.holds}


def _identity(found: Identity) -> dict[str, Any]:
    return {
        "num_tokens": found.num_tokens,
        "holds": found.holds,
        "differences": [asdict(difference) for difference in found.differences],
    }


def _print(engine: Engine, proof: Proof) -> None:
    console = Console(highlight=False, soft_wrap=True)
    parts, own = engine.parts, proof.up_to_ties
    console.print(
        f"exact law          {_word(proof.exact_law)}  enumerated, largest error {proof.law_error:.1e}"
        f" ({name_of(parts.verifier)}, {parts.length!r})"
    )
    console.print(f"greedy identical   {_word(proof.identical.holds)}  float32, {proof.identical.num_tokens} tokens")
    for difference in proof.identical.differences:
        console.print(f"                   {_parting(difference)}")
    dtype = _dtype(engine).removeprefix("torch.")
    console.print(f"greedy up to ties  {len(own.differences)} differences in {own.num_tokens} tokens ({dtype})")
    for difference in own.differences:
        console.print(f"                   {_parting(difference)}")
    if proof.samples is not None:
        for line in _sampled(proof.samples):
            console.print(line)


def _sampled(samples: Samples) -> list[str]:
    word = {"fits": "holds ", "differs": "FAILS ", "inconclusive": "inconclusive"}[samples.verdict]
    at = ", ".join(f"{temperature:g}" for temperature in dict.fromkeys(samples.temperatures))
    first = (
        f"samples            {word}  p = {samples.test.p_value:.3f} over the first {samples.length} tokens of "
        f"{samples.test.num_draws} outputs at temperature {at} ({samples.test.degrees} degrees of freedom)"
    )
    share = f"{samples.num_accepted_tokens} of {samples.num_draft_tokens} draft tokens accepted"
    doubt = f"; {samples.doubt}" if samples.verdict == "inconclusive" else ""
    return [first, f"                   {share}{doubt}"]


def _dtype(engine: Engine) -> str:
    return str(getattr(engine.parts.target, "dtype", ""))


def _parting(d: Difference) -> str:
    return (
        f"prompt {d.prompt}, token {d.position}: {d.plain} plainly, {d.drafted} drafted; "
        f"logit gap {d.gap:.2g} in a row that spans {d.span:.2g}"
    )


def _word(fine: bool) -> str:
    return "holds " if fine else "FAILS "
