"""outrider prove --url: a server's greedy identity and its samples, over HTTP."""

import json
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console

from outrider.bench.workloads.workload import BUILT_IN, read_workload
from outrider.cli.remote import RemoteOptions
from outrider.cli.supported import URL
from outrider.core import progress
from outrider.core.inputs import InputError
from outrider.core.option import Bounds
from outrider.serve.client.proof import RemoteProof, prove
from outrider.setup import Setup

NUM_PROMPTS = 4


def prove_url(
    setup: Setup, options: RemoteOptions, *, num_draws: int, temperature: float | None, seed: int, as_json: bool
) -> None:
    """Prove a server and print the findings. Exit status 1 if anything fails."""
    URL.check(setup)
    Bounds(least=0).check("num_draws", num_draws)
    if temperature not in (None, 1.0):
        raise InputError("a server tells its log-probabilities at temperature 1; leave out --temperature with --url")
    remote = options.remote()
    prompts = [each.opening for each in read_workload(BUILT_IN).conversations if isinstance(each.opening, str)]
    model = str(options.card(remote)["id"])
    with progress.shown(), progress.task("proving", NUM_PROMPTS + num_draws, "checks") as bar:
        proof = prove(
            remote,
            prompts[:NUM_PROMPTS],
            num_draws=num_draws,
            seed=seed,
            progress=bar.advance,
        )
    if as_json:
        print(json.dumps(record(model, proof), indent=2))
    else:
        _print(proof)
    raise typer.Exit(0 if proof.holds else 1)


def record(model: str, proof: RemoteProof) -> dict[str, Any]:
    """The object of `--json`."""
    values: dict[str, Any] = {"model": model, "greedy": asdict(proof.greedy) | {"holds": proof.greedy.holds}}
    if (drawn := proof.drawn) is not None:
        values["drawn"] = asdict(drawn) | {"p_value": drawn.p_value, "verdict": drawn.verdict, "doubt": drawn.doubt}
    return values | {"proven": proof.holds}


def _print(proof: RemoteProof) -> None:
    console = Console(highlight=False, soft_wrap=True)
    greedy, drawn = proof.greedy, proof.drawn
    word = "holds " if greedy.holds else "FAILS "
    console.print(
        f"greedy identical   {word}  {greedy.num_tokens} tokens are the likeliest ones of a forward without drafts, up "
        f"to its rounding of {greedy.noise:.1e} nats"
    )
    for each in greedy.differences:
        console.print(
            f"                   prompt {each.prompt}, token {each.position}: {each.token} is {each.gap:.3g} nats less "
            "likely than the likeliest"
        )
    if drawn is None:
        return
    word = {"fits": "holds ", "differs": "FAILS ", "inconclusive": "inconclusive"}[drawn.verdict]
    doubt = f"; {drawn.doubt}" if drawn.verdict == "inconclusive" else ""
    drafts = "unknown" if drawn.num_draft_tokens is None else str(drawn.num_draft_tokens)
    console.print(
        f"samples            {word}  p = {drawn.p_value:.3f}: first tokens of {drawn.first.num_draws} outputs "
        f"(p = {drawn.first.p_value:.3f}, {drawn.first.degrees} degrees of freedom), ranks of {drawn.ranks.num_draws} "
        f"tokens (p = {drawn.ranks.p_value:.3f}); draft tokens meanwhile: {drafts}{doubt}"
    )
