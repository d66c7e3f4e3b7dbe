"""What a plan advises: a way for each number of requests, and the sentence that says it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from outrider.plan.prediction import Planner, PlanPrediction, ranked
from outrider.plan.ways import DraftConfiguration


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The predictions of all ways for some numbers of requests.

    Attributes:
        by_requests: For each number of requests, the predictions, the best first.
    """

    by_requests: Mapping[int, Sequence[PlanPrediction]]

    @classmethod
    def of(cls, planner: Planner, ways: Sequence[DraftConfiguration], requests: Sequence[int]) -> "Advice":
        """Predict every way for every number of requests."""
        return cls(by_requests={b: ranked([planner.predict(way, b) for way in ways]) for b in requests})

    def chosen(self, requests: int) -> PlanPrediction:
        """What to use: the way whose speedup is certain to be the largest; plain decoding if none is certain."""
        return self.by_requests[requests][0]

    def sentence(self) -> str:
        """What to use for the smallest number of requests, and whether it changes with more."""
        first = min(self.by_requests)
        best = self.chosen(first)
        text = _advised(best, self.by_requests[first], first)
        others = [b for b in sorted(self.by_requests) if self.chosen(b).way != best.way]
        if not others:
            return text
        changes = ", ".join(f"{self.chosen(b).way.name} for {b}" for b in others)
        return f"{text} With more requests at once: {changes}."

    def values(self) -> dict[str, Any]:
        """The advice as values of JSON."""
        return {
            "verdict": self.sentence(),
            "plans": [
                {
                    "requests": b,
                    "chosen": predictions[0].way.name,
                    "options": predictions[0].way.options(),
                    "predictions": [values_of(each) for each in predictions],
                }
                for b, predictions in self.by_requests.items()
            ],
        }


def values_of(prediction: PlanPrediction) -> dict[str, Any]:
    """A prediction as values of JSON."""
    way = prediction.way
    return {
        "name": way.name,
        **way.options(),
        "certainty": way.certainty,
        "requests": prediction.requests,
        **{
            name: asdict(getattr(prediction, name))
            for name in ("block_efficiency", "tokens_per_second", "latency", "speedup")
        },
        "seconds_per_step": prediction.seconds,
        "break_even": prediction.break_even,
        "break_even_acceptance": prediction.break_even_acceptance,
        "notes": list(prediction.notes),
    }


def _advised(best: PlanPrediction, predictions: Sequence[PlanPrediction], requests: int) -> str:
    for_whom = "one request" if requests == 1 else f"{requests} requests at once"
    if not best.way.is_plain:
        speed = best.speedup
        return (
            f"Use {best.way.name}: {speed.value:.2f} times as fast as plain decoding for {for_whom} "
            f"({speed.low:.2f} to {speed.high:.2f})."
        )
    drafting = [each for each in predictions if not each.way.is_plain]
    if not drafting:
        return f"Do not speculate for {for_whom}: there is no way of drafting to choose from."
    near = max(drafting, key=lambda each: each.speedup.value)
    tau = near.block_efficiency
    needed = f"it breaks even at {near.break_even:.2f} tokens per step and would have {tau.value:.2f}"
    if near.break_even_acceptance is not None:
        needed += f"; that is where {near.break_even_acceptance:.0%} of the draft tokens are accepted"
    why = "the best way would be slower" if near.speedup.high < 1 else "no way is certain to be faster"
    return f"Do not speculate for {for_whom}: {why}. The nearest is {near.way.name}: {needed}."
