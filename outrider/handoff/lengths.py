"""The draft lengths that a plan advises for one drafter, and what its figures say of what is lost."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider import catalog
from outrider.core.inputs import InputError, parse_json, text_of

CHAIN = "chain"
STANDARD = ("token", "match")
"""The verifiers that other engines have, by Outrider's names."""


@dataclass(frozen=True, kw_only=True)
class PlanFile:
    """What `outrider plan --json` printed, as far as one drafter is concerned.

    Attributes:
        by_requests: For each number of requests at once, the predictions of plain decoding and of ways with the
            drafter, the best first.
    """

    by_requests: Mapping[int, Sequence[Mapping[str, Any]]]

    @classmethod
    def read(cls, file: Path, drafter: str) -> "PlanFile":
        """The predictions of a file.

        Args:
            drafter: The drafter as it was written.

        Raises:
            InputError: The file is none of a plan, or the plan does not compare the drafter.
        """
        plan = parse_json(text_of(file, "plan", "what `outrider plan --json` printed"), str(file))
        try:
            plans = {int(each["requests"]): list(each["predictions"]) for each in plan["plans"]}
            names = {str(each["drafter"]) for each in next(iter(plans.values()))} - {"none"}
            drafter_name = _same(drafter, sorted(names))
        except (AttributeError, KeyError, TypeError, ValueError, StopIteration) as error:
            raise InputError(f"{file} is no plan; give what `outrider plan --json` printed") from error
        if drafter_name is None:
            raise InputError(
                f"{file} compares the drafters {', '.join(sorted(names))}, and not {drafter}; plan with --drafter "
                f"{drafter}"
            )
        return cls(
            by_requests={
                count: [each for each in predictions if each["drafter"] in ("none", drafter_name)]
                for count, predictions in sorted(plans.items())
            }
        )

    @property
    def lengths(self) -> dict[int, int]:
        """Draft tokens of a chain for each number of requests; 0 where plain decoding is better."""
        return {count: _length(self._best(predictions, CHAIN)) for count, predictions in self.by_requests.items()}

    def costs(self) -> list[str]:
        """What is lost by chains and by the other engine's verifier, in tokens per step and in speed."""
        count, predictions = min(self.by_requests.items())
        best, chain = self._best(predictions), self._best(predictions, CHAIN)
        standard = self._best(predictions, CHAIN, STANDARD)
        lines = [_lost("the draft becomes a chain", best, chain, count)]
        lines.append(_lost("the verifier becomes the other engine's", chain, standard, count))
        return [line for line in lines if line]

    def _best(
        self, predictions: Sequence[Mapping[str, Any]], tree: str | None = None, verifiers: Sequence[str] = ()
    ) -> Mapping[str, Any]:
        """The best prediction of some trees and verifiers; the first is the best of all."""
        for each in predictions:
            plain = each["drafter"] == "none"
            fits = tree is None or each.get("tree") == tree
            if plain or (fits and (not verifiers or each.get("verifier") in verifiers)):
                return each
        raise InputError("the plan has no way to decode with this drafter in a chain; plan again")


def _length(prediction: Mapping[str, Any]) -> int:
    return 0 if prediction["drafter"] == "none" else int(str(prediction["length"]).partition(":")[2])


def _lost(what: str, before: Mapping[str, Any], after: Mapping[str, Any], count: int) -> str:
    """A sentence on one change; empty if nothing changes."""
    if before["name"] == after["name"]:
        return ""
    tokens, speed = (
        (float(before[key]["value"]), float(after[key]["value"])) for key in ("block_efficiency", "speedup")
    )
    whom = "one request" if count == 1 else f"{count} requests at once"
    return (
        f"{what}: {tokens[1]:.2f} tokens per step instead of {tokens[0]:.2f}, predicted for {whom} "
        f"({after['name']} instead of {before['name']}); on the planned machine {speed[1]:.2f} instead of "
        f"{speed[0]:.2f} times plain decoding"
    )


def _same(drafter: str, names: Sequence[str]) -> str | None:
    """The drafter among those of a plan; by its path, otherwise by its kind if one alone is of it."""
    if drafter in names:
        return drafter
    mine = catalog.make("drafter", drafter)
    kind, path = catalog.name_of(mine), getattr(mine, "path", None)
    alike: dict[str, str] = {}
    for name in names:
        if name.partition(":")[0] == kind or name == path:
            alike[name] = name.partition("path=")[2].partition(",")[0] or name
    exact = [name for name, place in alike.items() if path and os.path.realpath(place) == os.path.realpath(str(path))]
    if exact:
        return exact[0]
    return next(iter(alike)) if len(alike) == 1 else None
