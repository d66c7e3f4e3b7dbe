"""outrider prove: the exact law of the rule, greedy identity of this pair, and a chi-square test of its samples."""

import json
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from outrider.catalog import name_of
from outrider.cli import options
from outrider.cli.options import Setup
from outrider.decoding.protocol import Parts
from outrider.decoding.step import StepDecoding
from outrider.engine.engine import Engine
from outrider.lengths.fixed import FixedLength
from outrider.lengths.protocol import BatchPolicy
from outrider.lm.tabular import TabularLM, random_rows
from outrider.proof.enumerate import joint_law, law
from outrider.proof.gate import NUM_TOKENS, PROMPTS, in_float32
from outrider.proof.identity import Identity, identity
from outrider.proof.statistics import sampled_law
from outrider.trees.gumbel import GumbelTree
from outrider.trees.iid import IidTree
from outrider.trees.protocol import Tree
from outrider.trees.top_plus_one import TopPlusOneTree
from outrider.types import InputError, Sampling, Structure
from outrider.verifiers.protocol import Carrying

LAW_BOUND = 1e-12
SMALL: dict[Structure, Tree] = {
    "iid": IidTree(num_paths=2),
    "iid_dedup": IidTree(num_paths=2, dedup=True),
    "without_replacement": GumbelTree(branching=(2, 2)),
    "top_plus_one": TopPlusOneTree(width=2),
}
P_BOUND = 1e-3


def prove(
    target: options.Target = None,
    drafter: options.Drafter = None,
    tree: options.Tree = "chain",
    verifier: options.Verifier = None,
    length: options.Length = None,
    decoding: options.Decoding = "step",
    allow_lossy: options.AllowLossy = False,
    num_draws: Annotated[int, typer.Option(help="Sequences to draw for the chi-square test; 0 leaves it out.")] = 1000,
    temperature: Annotated[float, typer.Option(help="Temperature of the chi-square test, above 0.")] = 0.7,
    seed: Annotated[int, typer.Option(help="Seed of the chi-square test.")] = 0,
    max_context: options.MaxContext = None,
    compile: options.Compile = False,
    prepack: options.Prepack = None,
    device: options.Device = None,
    dtype: options.Dtype = "auto",
    attn_implementation: options.Attention = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.Json = False,
) -> None:
    """Check a pair. Exit status 1 if anything fails.

    Exact law: the rule's law, enumerated on small tables, equals the target's. Greedy identical: in float32 this
    pair's greedy output is that of plain decoding. Greedy up to ties: in the pair's own dtype, differences are listed
    with their logit gap. Samples: drawn sequences fit the target's probabilities.
    """
    if num_draws < 0 or not temperature > 0:
        raise InputError(f"num_draws must be >= 0 and temperature > 0, got {num_draws} and {temperature}")
    engine = Setup(
        target=target,
        drafter=drafter,
        tree=tree,
        verifier=verifier,
        length=length,
        decoding=decoding,
        allow_lossy=allow_lossy,
        device=device,
        dtype=dtype,
        attn_implementation=attn_implementation,
        revision=revision,
        trust_remote_code=trust_remote_code,
        batch_size=8,
        max_context=max_context,
        compile=compile,
        prepack=prepack,
    ).engine()
    found: dict[str, Any] = {"verifier": name_of(engine.parts.verifier), "length": repr(engine.parts.length)}
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    prompts = [engine.encode(p) for p in PROMPTS] if engine.tokenizer else [[1], [2, 3], [3, 1, 2]]
    with Progress(console=console, transient=True, disable=as_json) as progress:
        task = progress.add_task("proving", total=3 + num_draws)
        error = _law_error(engine)
        found["law_error"], found["exact_law"] = error, error < LAW_BOUND
        progress.advance(task)
        exact = identity(in_float32(engine), prompts, NUM_TOKENS)
        found["greedy_identical"] = _identity(exact)
        progress.advance(task)
        own = identity(engine, prompts, NUM_TOKENS)
        found["greedy_up_to_ties"] = _identity(own) | {"dtype": str(getattr(engine.parts.target, "dtype", ""))}
        progress.advance(task)
        if num_draws:
            settings = Sampling(temperature=temperature, seed=seed)
            test = sampled_law(
                engine, prompts[0], settings, num_draws, progress=lambda count: progress.advance(task, count)
            )
            found["samples"] = asdict(test) | {"temperature": temperature, "fits": test.p_value > P_BOUND}
    fine = found["exact_law"] and exact.holds and (not num_draws or found["samples"]["fits"])
    found["proven"] = fine
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        _print(found, exact, own)
    raise typer.Exit(0 if fine else 1)


def _law_error(engine: Engine) -> float:
    """Law error of the engine's rule and length policy on small random tables, with its own kind of drafter.

    A tree that is drawn stands for its structure: one that is small enough to be enumerated takes its place. A policy
    that shares a budget is enumerated over a batch of two. Decoding that drafts ahead drafts two tokens, and is walked
    until it verifies some that were drafted while others were verified.
    """
    parts = engine.parts
    if parts.decoding.drafts_ahead:
        return _law_error_ahead(parts)
    shared = isinstance(parts.length, BatchPolicy)
    vocab, depth = (2, 3) if shared else (3, 2 if parts.tree.structure in SMALL else 4)
    small = Parts(
        target=TabularLM(random_rows(vocab, seed=0), vocab, max_context=8 + 1 + depth),
        drafter=parts.drafter.on_tables(vocab, seed=1),
        decoding=StepDecoding(),
        tree=SMALL.get(parts.tree.structure, parts.tree),
        verifier=parts.verifier,
        length=parts.length,
    )
    prompt = [token % vocab for token in (0, 1, 2, 0, 1, 2, 0, 1)]
    if shared:
        return max(found.error for found in joint_law(small, [prompt, prompt[::-1]]))
    return (
        law(small, prompt, 3, horizon=3).error if isinstance(parts.verifier, Carrying) else law(small, prompt, 1).error
    )


def _law_error_ahead(parts: Parts) -> float:
    small = replace(
        parts,
        target=TabularLM(random_rows(3, seed=0), 3),
        drafter=parts.drafter.on_tables(3, seed=1),
        length=FixedLength(num_speculative_tokens=2),
    )
    return law(small, [0, 1, 2, 0, 1, 2, 0, 1], 3).error


def _identity(found: Identity) -> dict[str, Any]:
    return {
        "num_tokens": found.num_tokens,
        "holds": found.holds,
        "differences": [asdict(difference) for difference in found.differences],
    }


def _print(found: dict[str, Any], exact: Identity, own: Identity) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"exact law          {_word(found['exact_law'])}  enumerated, largest error {found['law_error']:.1e}"
        f" ({found['verifier']}, {found['length']})"
    )
    console.print(f"greedy identical   {_word(exact.holds)}  float32, {exact.num_tokens} tokens")
    for difference in exact.differences:
        console.print(f"                   {_parting(difference)}")
    dtype = found["greedy_up_to_ties"]["dtype"].removeprefix("torch.")
    console.print(f"greedy up to ties  {len(own.differences)} differences in {own.num_tokens} tokens ({dtype})")
    for difference in own.differences:
        console.print(f"                   {_parting(difference)}")
    if "samples" in found:
        samples = found["samples"]
        console.print(
            f"samples            {_word(samples['fits'])}  p = {samples['p_value']:.3f} over {samples['num_draws']} "
            f"sequences at temperature {samples['temperature']} ({samples['degrees']} degrees of freedom)"
        )


def _parting(d: Any) -> str:
    return (
        f"prompt {d.prompt}, token {d.position}: {d.plain} plainly, {d.drafted} drafted; "
        f"logit gap {d.gap:.2g} in a row that spans {d.span:.2g}"
    )


def _word(fine: bool) -> str:
    return "holds " if fine else "FAILS "
