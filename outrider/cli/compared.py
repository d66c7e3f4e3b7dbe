"""`outrider generate --compare`: speculative beside plain decoding. Imported only if it is asked for."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from outrider.bench.side_by_side.comparison import compare, figures
from outrider.cli.printed import table
from outrider.core import progress
from outrider.core.types import Sampling
from outrider.engine.engine import Engine
from outrider.engine.generation import Generation
from outrider.engine.prompts import Prompt
from outrider.proof.gate import gate

ROUNDS = 3
"""How often the ways of a comparison are timed, at most."""
TIME_LIMIT = 120.0
"""Seconds of a comparison after which no new round begins."""


def compared(engine: Engine, prompts: Sequence[Prompt], settings: Sampling, max_new_tokens: int) -> dict[str, Any]:
    """Compare speculative and plain decoding of the same prompts, after the gate."""
    with progress.shown("comparing with plain decoding"):
        gate(engine)
        asked = [engine.encode(prompt) for prompt in prompts]
        generation = Generation(max_new_tokens=max_new_tokens, sampling=settings)
        return figures(compare(engine, asked, generation, rounds=ROUNDS, time_limit=TIME_LIMIT))


def print_comparison(comparison: Mapping[str, Any]) -> None:
    """Print the result of `compared`."""
    rounds = comparison["rounds"]
    runs = "one run of each" if rounds == 1 else f"medians of {rounds} interleaved runs"
    rates = table(("configuration", "tokens/s"), f"measured side by side, {runs}")
    for name, rate in comparison["tokens_per_second"].items():
        rates.add_row(name, f"{rate:.1f}")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(rates)
    console.print(
        f"speedup {comparison['speedup']:.2f} over {comparison['plain']}, the fastest that drafts nothing", style="cyan"
    )
