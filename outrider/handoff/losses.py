"""What a drafter loses in an engine that decodes chains, in tokens per step."""

from collections.abc import Sequence

from outrider.engine.engine import Engine
from outrider.handoff.engines import KNOWN
from outrider.handoff.handed import Handed
from outrider.handoff.order import Order


def predicted(order: Order, handed: Handed, engine: Engine | None) -> Sequence[str]:
    """What is lost where a draft becomes a chain, a sentence each.

    Args:
        engine: The target with the drafter; None where nothing is measured.
    """
    if KNOWN[order.to].tree(handed):
        return []
    return ["Drafts that branch become chains. Its price is unknown; `outrider plan --json` tells it, for --plan."]
