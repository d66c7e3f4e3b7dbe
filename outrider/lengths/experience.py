"""What an engine knows when it chooses a draft length: the costs of steps, pooled acceptance, and its last choices."""

import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any

from outrider.core.types import Request, Step
from outrider.host import remembered
from outrider.lengths.acceptance import PooledAcceptance
from outrider.lengths.costs import CostTable
from outrider.lengths.drift import Drift
from outrider.lengths.hits import Hits

RECORD = "acceptance"
"""The kind of record that keeps pooled acceptance between processes."""
MOST_RECALLED = 32.0
"""As how many tested tokens of a depth the acceptance of earlier processes counts at most, and as how many drafts what
they found: texts differ."""
FIRST_SAVE, SAVE = 8, 1024
"""Steps after which acceptance is saved first, and most steps between later saves."""
PAUSE = 600.0
"""Least seconds between two measurements of the costs."""
MOST_DOUBT = 0.1
"""Costs of more doubt are measured again, because drafts then have to gain too much."""


@dataclass(frozen=True, kw_only=True)
class PolicyState:
    """What the last choices were, so that lengths do not change at every step.

    Attributes:
        ids: The requests of the last step.
        rooms: Longest drafts that they could make.
        lengths: Their draft lengths.
        age: Steps since these were chosen.
        length: The last draft length of requests without a seed; 0 while their drafts are not likely to gain.
        gain: How much faster than plain steps drafts seemed by the last plan, as a share; None before any.
    """

    ids: Sequence[str] = ()
    rooms: Sequence[int] = ()
    lengths: Sequence[int] = ()
    age: int = 0
    length: int = 0
    gain: float | None = None


@dataclass(frozen=True, kw_only=True)
class LengthChoice:
    """The draft lengths of one step.

    Attributes:
        lengths: Longest draft of each request.
        state: What the next choice will remember.
        context: Tokens of a request before the step, on average.
    """

    lengths: Sequence[int]
    state: PolicyState
    context: int = 0


class Experience:
    """What an engine knows of its steps. An engine owns it; it changes in place.

    Attributes:
        costs: What steps cost; None if that is not known.
        greedy: Pooled acceptance of requests at temperature 0.
        sampled: Pooled acceptance of all others.
        state: The last choices.
        num_steps: Number of steps so far.

    Args:
        key: Under which acceptance is kept between processes; None keeps none.
        due: Whether the costs must be measured when no request runs.
    """

    def __init__(self, costs: CostTable | None = None, *, key: Mapping[str, Any] | None = None, due: bool = False):
        self.costs = costs
        self.greedy = PooledAcceptance()
        self.sampled = PooledAcceptance()
        self.state = PolicyState()
        self.num_steps = 0
        self._key = key
        self._due = due
        self._began = time.monotonic()
        self._drift = Drift()
        self._next_save = FIRST_SAVE

    @classmethod
    def recalled(cls, costs: CostTable | None, key: Mapping[str, Any]) -> "Experience":
        """With the acceptance that an earlier process kept under this key, if any. It keeps its own there too."""
        experience, kept = cls(costs, key=key), remembered.read(RECORD, key)
        if kept is not None:
            try:
                experience.greedy, experience.sampled = _recalled(kept["greedy"]), _recalled(kept["sampled"])
            except (KeyError, TypeError, ValueError, OverflowError):
                return cls(costs, key=key)
        return experience

    @property
    def stale(self) -> bool:
        """Whether the costs must be measured anew, as soon as no request runs."""
        if self._due or self.costs is None:
            return self._due
        return (self._drift.detected or self.costs.doubt > MOST_DOUBT) and time.monotonic() - self._began > PAUSE

    @property
    def cost_drift(self) -> float:
        """What the last steps took, over what they cost by the table."""
        return self._drift.ratio

    def pooled(self, request: Request) -> PooledAcceptance:
        """The pooled acceptance of requests like this one."""
        return self.sampled if request.sampling.temperature > 0 else self.greedy

    def with_costs(self, costs: CostTable | None) -> "Experience":
        """The same acceptance with other costs, which are not due."""
        other = Experience(costs, key=self._key)
        other.greedy, other.sampled = self.greedy, self.sampled
        return other

    def copied(self) -> "Experience":
        """A copy that learns apart and keeps nothing. The costs are shared, because they never change."""
        other = Experience(self.costs)
        other.greedy, other.sampled, other.state = deepcopy(self.greedy), deepcopy(self.sampled), self.state
        return other

    def note(
        self, choice: LengthChoice, requests: Sequence[Request], steps: Sequence[Step], seconds: float | None = None
    ) -> None:
        """Learn acceptance from a step, and remember its choice.

        Args:
            requests: The requests of the step.
            steps: What happened to each of them.
            seconds: What the step took; None where it did more than draft and verify, such as prefill, so that its
                time cannot be compared.
        """
        self.state = choice.state
        self.num_steps += 1
        drafts = [(step.num_draft_tokens, step.num_accepted_tokens) for step in steps]
        draws = [request.sampling.temperature > 0 for request in requests]
        drafting = sum([drafted > 0 for drafted, _ in drafts])
        for pooled, drawn in ((self.greedy, False), (self.sampled, True)):
            indices = [i for i, each in enumerate(draws) if each == drawn]
            if indices:
                pooled.note([drafts[i] for i in indices], asked=sum([choice.lengths[i] > 0 for i in indices]))
        if self.costs is not None and seconds is not None:
            longest = max(drafts)[0]
            costs = self.costs.steps(len(steps), sampled=any(draws), context=choice.context, longest=longest)
            self._drift.note(seconds, costs[drafting][longest])
        if self.num_steps >= self._next_save:
            self._next_save += min(self._next_save, SAVE)
            self.save()

    def save(self) -> None:
        """Keep the acceptance for later processes."""
        if self._key is not None:
            remembered.write(RECORD, self._key, {"greedy": asdict(self.greedy), "sampled": asdict(self.sampled)})


def _recalled(kept: Mapping[str, Any]) -> PooledAcceptance:
    """Kept counts, at most `MOST_RECALLED` drafts and tokens of a depth. Raises ValueError for impossible ones."""
    pooled = PooledAcceptance()
    for tested, accepted in zip(map(float, kept["tested"]), map(float, kept["accepted"]), strict=True):
        if not 0 <= accepted <= tested < float("inf"):
            raise ValueError(f"{accepted} of {tested} tokens cannot have been accepted")
        weight = min(1.0, MOST_RECALLED / max(tested, 1e-9))
        pooled.tested.append(weight * tested)
        pooled.accepted.append(weight * accepted)
    hits = Hits(**{name: float(count) for name, count in dict(kept.get("hits", {})).items()})
    if not 0 <= hits.found <= hits.asked < float("inf"):
        raise ValueError(f"{hits.found} of {hits.asked} drafts cannot have been found")
    pooled.hits = hits.at_most(MOST_RECALLED)
    return pooled
