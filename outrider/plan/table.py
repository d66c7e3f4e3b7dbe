"""The costs of steps that are kept on this machine: read, or measured and kept."""

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from outrider import catalog
from outrider.decoding.protocol import Parts
from outrider.drafters.protocol import lm_of
from outrider.host import remembered
from outrider.host.remembered import machine, shapes
from outrider.lengths.costs import CostTable
from outrider.lengths.experience import MOST_DOUBT, PAUSE, Experience
from outrider.plan.probe import ALONE, LENGTHS, measure

RECORD = "costs"
"""The kind of record that keeps costs between processes."""
FEW, MANY = 8, 16
"""Most requests of a step that is measured, for engines of at most so few slots and for all others. Costs of larger
steps follow from these. The others have a table of their own, because steps of many requests leave less time for small
ones.
"""


def experience_of(parts: Parts, *, max_slots: int, probe: bool) -> Experience:
    """What a new engine knows: kept or newly measured costs, and the acceptance that earlier processes saw.

    Where drafts seemed to lose in the last process, costs that were measured once or twice are measured again: that
    moment may have been a bad one.

    Args:
        max_slots: Most requests at once.
        probe: Whether to measure costs that are not kept.
    """
    key = key_of(parts)
    if parts.tree.structure != "chain":
        key = {**key, "tree": catalog.name_of(parts.tree)}
    experience = Experience.recalled(costs_of(parts, max_slots=max_slots, probe=probe), key)
    if probe and experience.unsettled:
        return measured_again(replace(parts, experience=experience), max_slots=max_slots)
    return experience


def costs_of(parts: Parts, *, max_slots: int, probe: bool, most_doubt: float = math.inf) -> CostTable | None:
    """The costs of steps: the kept ones, otherwise measured ones; None without either.

    Args:
        max_slots: Most requests at once.
        probe: Whether to measure costs that are not kept.
        most_doubt: Kept costs of more doubt are measured again, thoroughly. A limit asks for a thorough measurement.
            Without one, kept costs of more than `MOST_DOUBT` are measured again after `PAUSE` seconds.
    """
    if parts.drafter.max_depth == 0:
        return None
    max_requests = min(max_slots, MANY, parts.target.max_slots)
    kept = read(parts, max_requests)
    if not probe or (kept is not None and kept.doubt <= most_doubt and not _outdated(kept)):
        return kept
    table = measured(parts, max_slots=max_slots, thorough=most_doubt < math.inf)
    return kept if table is None or (table.busy and kept is not None) else table


def _outdated(kept: CostTable) -> bool:
    """Whether costs are so uncertain that they have to be measured again, and old enough for it."""
    return kept.doubt > MOST_DOUBT and time.time() - (kept.measured or 0.0) > PAUSE


def measured(parts: Parts, *, max_slots: int, thorough: bool = False) -> CostTable | None:
    """Measure the costs of steps and keep them, unless other processes took the cores meanwhile.

    A short measurement is combined with kept costs that are uncertain. All slots of the target must be free.
    """
    max_requests = min(max_slots, MANY, parts.target.max_slots)
    table = measure(parts, max_requests=max_requests, thorough=thorough)
    if table is not None and not table.busy:
        kept = None if thorough else read(parts, max_requests)
        if kept is not None and (kept.doubt > MOST_DOUBT or parts.experience.unsettled):
            table = table.combined(kept)
        remembered.write(RECORD, _key_of_table(parts, max_requests), {"max_requests": max_requests, **table.values()})
        # What is read back is what other processes read. Where nothing can be written it is nothing.
        return read(parts, max_requests) or table
    return table


def measured_again(parts: Parts, *, max_slots: int) -> Experience:
    """The experience of parts after their costs were measured anew. On a busy machine the old costs stay."""
    table, old = measured(parts, max_slots=max_slots), parts.experience.costs
    return parts.experience.with_costs(old if table is None or (table.busy and old is not None) else table)


def read(parts: Parts, max_requests: int = 1) -> CostTable | None:
    """The kept costs, if they were measured up to so many requests; None if there are none."""
    values = remembered.read(RECORD, _key_of_table(parts, max_requests))
    try:
        if values is None or int(values["max_requests"]) < max_requests:
            return None
        return replace(CostTable.of_values(values), kept=True)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def key_of(parts: Parts) -> Mapping[str, Any]:
    """What the cost of a step depends on: machine and versions, shapes of weights, forwards, drafter and verifier."""
    draft = lm_of(parts.drafter)
    # A draft model with another vocabulary stands behind a translation.
    models = (parts.target, getattr(draft, "lm", draft))
    config = getattr(getattr(parts.target, "model", None), "config", None)
    return {
        "machine": machine(parts.target.device),
        "target": shapes(parts.target.modules),
        "vocab_size": parts.target.vocab_size,
        "attention": getattr(config, "_attn_implementation", None),
        "drafter": [catalog.name_of(parts.drafter), shapes(parts.drafter.modules)],
        "forwards": [[getattr(lm, name, None) for name in ("forward", "pad_to")] for lm in models],
        "verifier": catalog.name_of(parts.verifier),
    }


def _key_of_table(parts: Parts, max_requests: int) -> Mapping[str, Any]:
    """Under which costs of steps of up to so many requests are kept. Tables of other kinds of steps are not read. Of a
    drafter of several, the one that costs most is measured.
    """
    kinds = {"alone": list(ALONE), "lengths": list(LENGTHS)}
    key = {**key_of(replace(parts, drafter=parts.drafter.components[-1])), **kinds}
    return {**key, "requests": MANY} if max_requests > FEW else key
