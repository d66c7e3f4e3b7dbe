"""A draft model that learns from traffic: when it learns, when it goes back, what it keeps."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from outrider.core.option import check, option
from outrider.drafters.model import ModelDrafter
from outrider.drafters.protocol import Drafter
from outrider.host.threads import release_threads
from outrider.learning.divergences import divergence
from outrider.training.online.corrections import Buffer, Lesson
from outrider.training.online.snapshots import Snapshots
from outrider.training.online.weights import OnlineDraft


@dataclass(frozen=True, kw_only=True)
class OnlineSettings:
    """How draft models learn from traffic.

    Attributes:
        interval: Number of requests of a draft model that must end before its next optimizer step.
        learning_rate: Of AdamW. Traffic of one kind bears 1e-3 or 1e-4; mixed traffic wants 1e-5.
        divergence: What an optimizer step lowers, between the target's rows and the drafter's.
        clip: Largest norm of a gradient.
        max_length: Most tokens of text before a correction that training reads.
        max_corrections: Most corrections in the buffer of a draft model, each with one row of logits. The oldest go
            first.
        in_thread: Whether optimizer steps run in a thread of their own, beside decoding. Otherwise requests wait.
        margin: By how much the acceptance rate may fall below that of the best weights before these come back; None
            never brings them back.
        least_drafted: Fewest draft tokens that say how good weights are.
        snapshots: The folder for snapshots; None writes none.
        snapshot_interval: Number of optimizer steps between two snapshots.
        resume: Whether to go on from the newest snapshot in the folder, if it holds one.

    Raises:
        InputError: A value that is out of bounds.

    Example:
        >>> OnlineSettings(interval=0)
        Traceback (most recent call last):
        ...
        outrider.core.inputs.InputError: interval must be >= 1, got 0
    """

    interval: int = option(8, least=1)
    learning_rate: float = option(1e-4, least=0)
    divergence: str = "fkl"
    clip: float = option(1.0, above=0, finite=False)
    max_length: int = option(512, least=1)
    max_corrections: int = option(1024, least=1)
    in_thread: bool = False
    margin: float | None = option(0.1, least=0, most=1, note=", or None for never")
    least_drafted: int = option(512, least=1)
    snapshots: Path | None = None
    snapshot_interval: int = option(16, least=1)
    resume: bool = False

    def __post_init__(self) -> None:
        check(self)
        divergence(self.divergence)


@dataclass(frozen=True, kw_only=True)
class BestWeights:
    """The weights with the highest acceptance rate so far."""

    acceptance_rate: float
    weights: list[Tensor]


class Pupil:
    """A draft model that learns from the requests that it drafts for. Changes in place.

    Attributes:
        draft: The draft model.
        buffer: The corrections that it has not learnt from.
        best: Its best weights so far; None before enough was drafted.
        num_rollbacks: How often its best weights have come back.

    Args:
        drafter: The draft model as a drafter.
        settings: How it learns.
        snapshots: Where its snapshots go; None: nowhere.
    """

    def __init__(self, drafter: ModelDrafter, settings: OnlineSettings, snapshots: Snapshots | None = None) -> None:
        self.draft = OnlineDraft(
            drafter,
            divergence=divergence(settings.divergence),
            learning_rate=settings.learning_rate,
            clip=settings.clip,
            max_length=settings.max_length,
        )
        self.buffer = Buffer(settings.max_corrections)
        self.best: BestWeights | None = None
        self.num_rollbacks = 0
        self._settings, self._snapshots = settings, snapshots
        self._active: set[str] = set()
        self._ended, self._drafted, self._accepted = 0, 0, 0
        self._waits = False
        self._worker = ThreadPoolExecutor(max_workers=1) if settings.in_thread else None
        self._job: Future[None] | None = None
        if settings.resume and snapshots is not None and (number := snapshots.newest()) is not None:
            self.draft.resume(snapshots.read(number), number)

    def note(self, id: str, *, drafted: int, accepted: int) -> None:
        """Count a step of one of its requests."""
        self._active.add(id)
        self._drafted += drafted
        self._accepted += accepted

    def between(self, running: Mapping[str, Drafter]) -> Drafter | None:
        """Learn if it is time, and return a new drafter if there is one. Called between steps.

        Args:
            running: The drafters of running requests.
        """
        ended = self._active - running.keys()
        self._active -= ended
        self._ended += len(ended)
        self._collect(wait=False)
        if self._ended >= self._settings.interval and self._job is None and not self._waits:
            self._ended = 0
            if not self._goes_back():
                self._learn()
        return self._published(running)

    def finish(self, running: Mapping[str, Drafter]) -> None:
        """Wait for a step under way, bring the newest weights to the drafter, and write the last snapshot.

        Args:
            running: The drafters of running requests.
        """
        self._collect(wait=True)
        if self._worker is not None:
            self._worker.shutdown()
        self._published(running)
        if self.draft.num_rounds:
            self._save()

    def _learn(self) -> None:
        """Make an optimizer step on what the buffer holds, or begin one in the thread."""
        lessons = self.buffer.take()
        if not lessons:
            return
        if self._worker is not None:
            self._job = self._worker.submit(self._round_beside, lessons)
        else:
            self._round(lessons)
            self._waits = True

    def _round(self, lessons: Sequence[Lesson]) -> None:
        """Make an optimizer step, and write a snapshot if it is time. Runs in any thread."""
        self.draft.learn(lessons)
        if self.draft.num_rounds % self._settings.snapshot_interval == 0:
            self._save()

    def _round_beside(self, lessons: Sequence[Lesson]) -> None:
        """A round in the thread."""
        try:
            self._round(lessons)
        finally:
            release_threads()

    def _collect(self, wait: bool) -> None:
        """Take note of a step that the thread has made. Raises the error that ended it."""
        if self._job is not None and (wait or self._job.done()):
            job, self._job = self._job, None
            job.result()
            self._waits = True

    def _goes_back(self) -> bool:
        """Compare the latest acceptance rate with the best one. If it has fallen too far, bring the best weights back.

        Afterwards the best weights are measured anew: if other traffic has come, their old rate is out of reach.
        """
        margin = self._settings.margin
        if margin is None or self._drafted < self._settings.least_drafted:
            return False
        rate, self._drafted, self._accepted = self._accepted / self._drafted, 0, 0
        if self.best is None or rate >= self.best.acceptance_rate:
            self.best = BestWeights(acceptance_rate=rate, weights=self.draft.weights())
        elif rate < self.best.acceptance_rate - margin:
            self.draft.restore(self.best.weights)
            self.buffer.clear()
            self.best, self._waits = None, True
            self.num_rollbacks += 1
            return True
        return False

    def _published(self, running: Mapping[str, Drafter]) -> Drafter | None:
        """A new drafter with newer weights, if there are any and a copy of the draft model is free."""
        drafter = self.draft.publish(list(running.values())) if self._waits else None
        self._waits = self._waits and drafter is None
        return drafter

    def _save(self) -> None:
        """Write a snapshot of the newest weights."""
        if self._snapshots is not None:
            self._snapshots.write(self.draft.written(), self.draft.num_rounds)
