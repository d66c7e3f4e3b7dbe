"""What an engine knows when it chooses a draft length: the costs of steps, pooled acceptance, and its last choices."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from outrider.core.types import Request, Step
from outrider.host import remembered
from outrider.lengths.acceptance import PRIOR, Counts
from outrider.lengths.costs import CostTable
from outrider.trees.protocol import Tree

RECORD = "accepted"
"""The kind of record that keeps pooled acceptance between processes."""
MOST_RECALLED = 32.0
"""As how many drafts, and tokens of a depth, those of earlier processes count at most: texts differ."""
FIRST_SAVE, SAVE = 8, 1024
"""Steps after which acceptance is saved first, and most steps between later saves."""
PAUSE, MOST_DOUBT = 600.0, 0.1
"""Least seconds between two measurements of the costs; and the standard error above which they are measured again,
because drafts then have to gain too much."""
SETTLED = 3
"""Costs by which drafts lose are measured so often before they are believed: one measurement tells of one moment."""
SMOOTH, OFF, DISTURBED = 64, 1.5, 2.5
"""Over how many steps the time of steps is averaged, by what factor it is off when the costs are measured again, and as
what factor one disturbed step counts at most."""


@dataclass(frozen=True, kw_only=True)
class PolicyState:
    """What the last choices were, so that lengths do not change at every step.

    Attributes:
        ids: The requests of the last step.
        rooms: Longest drafts that they could make.
        lengths: Their draft lengths.
        age: Steps since these were chosen.
        gain: How much faster than plain steps drafts seemed by the last plan, as a share; None before any.
    """

    ids: Sequence[str] = ()
    rooms: Sequence[int] = ()
    lengths: Sequence[int] = ()
    age: int = 0
    gain: float | None = None


@dataclass(frozen=True, kw_only=True)
class LengthChoice:
    """The draft lengths of one step.

    Attributes:
        lengths: Longest draft of each request.
        state: What the next choice will remember.
        context: Tokens of a request before the step, on average.
        looked: How long a draft each request looked for, where drafts were known before this choice.
        promised: What the drafter promises of the tokens of each such draft.
        tree: How drafts of this step grow, if they branch.
    """

    lengths: Sequence[int]
    state: PolicyState
    context: int = 0
    looked: Sequence[int] | None = None
    promised: Sequence[Sequence[float]] = ()
    tree: Tree | None = None

    @property
    def asked(self) -> Sequence[int]:
        """How long a draft was asked for of each request."""
        return self.lengths if self.looked is None else self.looked


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
        self.greedy = Counts()
        self.sampled = Counts()
        self.state = PolicyState()
        self.num_steps = 0
        self._key = key
        self._due = due
        self._began = time.monotonic()
        self._log_drift = 0.0
        self._next_save = FIRST_SAVE
        self._recalled_gain: float | None = None
        self._of_copies: Experience | None = None

    @classmethod
    def recalled(cls, costs: CostTable | None, key: Mapping[str, Any]) -> "Experience":
        """With the acceptance that an earlier process kept under this key, if any. It keeps its own there too."""
        experience, kept = cls(costs, key=key), remembered.read(RECORD, key)
        if kept is not None:
            try:
                experience.greedy, experience.sampled = _recalled(kept["greedy"]), _recalled(kept["sampled"])
                gain = kept.get("gain")
                experience._recalled_gain = None if gain is None else float(gain)
            except (KeyError, TypeError, ValueError, OverflowError):
                return cls(costs, key=key)
        return experience

    @property
    def stale(self) -> bool:
        """Whether the costs must be measured anew, as soon as no request runs."""
        if self._due or self.costs is None:
            return self._due
        off = abs(self._log_drift) > math.log(OFF) or self.costs.doubt > MOST_DOUBT or self.unsettled
        return off and time.monotonic() - self._began > PAUSE

    @property
    def unsettled(self) -> bool:
        """Whether drafts gain too little by costs that were measured fewer than `SETTLED` times, though most were
        accepted or none was tried.
        """
        gain = self._recalled_gain if self.state.gain is None else self.state.gain
        if self.costs is None or gain is None or gain > self.costs.margin or self.costs.measurements >= SETTLED:
            return False
        pools = (self.greedy, self.sampled)
        asked, found = (sum(sum(getattr(pool, name)[:1]) for pool in pools) for name in ("tested", "accepted"))
        tested, accepted = (sum(sum(getattr(pool, name)[1:]) for pool in pools) for name in ("tested", "accepted"))
        return found * accepted >= PRIOR * asked * tested

    @property
    def cost_drift(self) -> float:
        """What the last steps took, over what they cost by the table. It changes no choice."""
        return math.exp(self._log_drift)

    @property
    def of_copies(self) -> "Experience":
        """What is known of steps that copy text in place of the drafter whose steps the costs are. It learns apart."""
        if self._of_copies is None:
            costs = None if self.costs is None else self.costs.without_drafter
            key = None if self._key is None else {**self._key, "copies": True}
            self._of_copies = Experience(costs) if key is None else Experience.recalled(costs, key)
        return self._of_copies

    def pooled(self, request: Request) -> Counts:
        """The pooled acceptance of requests like this one."""
        return self.sampled if request.sampling.temperature > 0 else self.greedy

    def with_costs(self, costs: CostTable | None) -> "Experience":
        """The same acceptance with other costs, which are not due."""
        other = Experience(costs, key=self._key)
        other.greedy, other.sampled = self.greedy, self.sampled
        if self._of_copies is not None:
            other._of_copies = self._of_copies.with_costs(None if costs is None else costs.without_drafter)
        return other

    def copied(self) -> "Experience":
        """A copy that learns apart and keeps nothing. The costs are shared, because they never change."""
        other = Experience(self.costs)
        other.greedy, other.sampled, other.state = self.greedy, self.sampled, self.state
        other._of_copies = None if self._of_copies is None else self._of_copies.copied()
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
        draws = [request.sampling.temperature > 0 for request in requests]
        if not all(draws):
            self.greedy = self.greedy.after([step for step, drawn in zip(steps, draws, strict=True) if not drawn])
        if any(draws):
            self.sampled = self.sampled.after([step for step, drawn in zip(steps, draws, strict=True) if drawn])
        if self.costs is not None and seconds is not None:
            drafted = [step.num_draft_tokens for step in steps]
            costs = self.costs.steps(len(steps), sampled=any(draws), context=choice.context, longest=max(drafted))
            over = seconds / costs[sum(map(bool, drafted))][max(drafted)]
            self._log_drift += (math.log(min(max(over, 1 / DISTURBED), DISTURBED)) - self._log_drift) / SMOOTH
        if self.num_steps >= self._next_save:
            self._next_save += min(self._next_save, SAVE)
            self.save()

    def save(self) -> None:
        """Keep the acceptance for later processes."""
        if self._of_copies is not None:
            self._of_copies.save()
        if self._key is not None:
            counts = {"greedy": asdict(self.greedy), "sampled": asdict(self.sampled)}
            remembered.write(RECORD, self._key, {**counts, "gain": self.state.gain})


def _recalled(kept: Mapping[str, Any]) -> Counts:
    """Kept counts, at most `MOST_RECALLED` drafts and tokens of a depth. Raises ValueError for impossible ones."""
    by_depth = {name: tuple(map(float, kept[name])) for name in ("tested", "accepted", "promised")}
    nodes, levels = (float(kept.get(name, 0.0)) for name in ("nodes", "levels"))
    counts = Counts(**by_depth, nodes=nodes, levels=levels)
    if not 0 <= levels <= nodes < float("inf"):
        raise ValueError(f"{nodes} nodes cannot stand on {levels} levels")
    promises = counts.promised + (0.0,) * (len(counts.tested) - len(counts.promised))
    for tested, accepted, promised in zip(counts.tested, counts.accepted, promises, strict=True):
        if not (0 <= accepted <= tested < float("inf") and 0 <= promised <= tested):
            raise ValueError(f"{accepted} of {tested} tokens cannot have been accepted, nor {promised} promised")
    return counts.at_most(MOST_RECALLED)
