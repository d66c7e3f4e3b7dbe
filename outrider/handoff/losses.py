"""What a drafter loses in an engine that decodes chains with a verifier of its own, in tokens per step."""

from collections.abc import Sequence

from outrider.core.types import Sampling
from outrider.engine.engine import Engine
from outrider.handoff.engines import KNOWN
from outrider.handoff.exported_drafter import ExportedDrafter
from outrider.handoff.order import ExportRequest
from outrider.handoff.smoke import prompts_of
from outrider.plan.prediction import expected_steps
from outrider.plan.record import RecordedRun
from outrider.plan.recording import record
from outrider.plan.ways import DraftConfiguration, ways_of

DRAWN = Sampling(temperature=1.0, seed=0)
"""How texts are drawn. At temperature 0, verifiers that follow the likeliest token are all alike."""
NAME = "drafter"


def predicted(order: ExportRequest, drafter: ExportedDrafter, engine: Engine | None) -> Sequence[str]:
    """What is lost where a draft becomes a chain and the verifier the engine's, a sentence each.

    A few texts are drawn. The coverage theory says how many steps each way of decoding is expected to take for them.

    Args:
        engine: The target with the drafter; None where nothing is measured.
    """
    if drafter.method == "custom_generate":
        return []
    tree = KNOWN[order.to].tree(drafter)
    if engine is None:
        return []
    trained = engine.parts.drafter
    recorded = record(
        engine,
        {NAME: trained},
        prompts_of(order, engine),
        sampling=DRAWN,
        max_new_tokens=order.new_tokens,
        depth=drafter.length,
    )
    ways = list(ways_of(NAME, trained, lengths=[drafter.length]))
    chains = {way.verifier: _rate(recorded, way) for way in ways if way.tree == "chain"}
    trees = [(_rate(recorded, way), way) for way in ways if way.tree != "chain"]
    greedy = order.to in ("llama.cpp", "openvino")
    if order.to == "vllm":
        greedy = drafter.speculative()["draft_sample_method"] == "greedy"
    kept = "match" if greedy else "token"
    lines: list[str] = []
    if kept in chains:
        best = max(chains, key=lambda rule: chains[rule])
        lines.append(
            f"The verifier: {chains[kept]:.2f} tokens per step by `{kept}` instead of {chains[best]:.2f} by `{best}`"
        )
    if trees and not tree:
        rate, way = max(trees, key=lambda pair: pair[0])
        lines.append(
            f"Trees: Outrider's small tree `{way.tree}` with verifier `{way.verifier}` makes {rate:.2f} tokens per "
            f"step, with {sum(way.widths)} nodes"
        )
    where = f"predicted at temperature 1 for drafts of {drafter.length} tokens on {len(recorded.texts)} short texts"
    return [f"{line}; {where}." for line in lines]


def _rate(recorded: RecordedRun, way: DraftConfiguration) -> float:
    """Tokens per step that a way is expected to make on all texts."""
    steps = expected_steps(recorded, way)
    return sum(each.tokens for each in steps) / sum(float(each.by_length.sum()) for each in steps)
