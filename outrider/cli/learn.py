"""`outrider generate --learn`: its options, and its report."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.core.inputs import InputError
from outrider.core.option import check, option
from outrider.setup import Setup

if TYPE_CHECKING:
    from outrider.engine.engine import Engine
    from outrider.engine.output import Output
    from outrider.training.online.learning import Learning
    from outrider.training.online.pupil import OnlineSettings
else:
    Engine = Output = Learning = OnlineSettings = object


MOST_DRAFTS = 64
"""Most draft models that learn at once; each is a model in memory."""


@dataclass(frozen=True, kw_only=True)
class LearnOptions:
    """How draft models learn from the requests of a command. An option that is not given is None.

    Attributes:
        learn: Train the draft model on the tokens that the target replaced, while requests run.
        learn_interval: Number of requests that end before the next optimizer step. By default 8.
        learn_rate: Learning rate. By default 1e-4.
        learn_divergence: What training lowers: `fkl`, `rkl`, `jsd:beta=0.5`, `tvd`, `nla` or `lk`. By default `fkl`.
        learn_in_thread: Train in a thread of its own, beside decoding; a server always does.
        learn_drafts: Number of draft models; prompts that are alike share one. By default 1.
        learn_snapshots: Write snapshots of the draft model to this new folder. A server goes on from the newest one in
            it.
    """

    learn: bool = False
    learn_interval: int | None = None
    learn_rate: float | None = None
    learn_divergence: str | None = None
    learn_in_thread: bool = False
    learn_drafts: int | None = option(None, least=1, most=MOST_DRAFTS)
    learn_snapshots: Path | None = None

    def __post_init__(self) -> None:
        if not self.learn and (changed := [f.name for f in fields(self) if getattr(self, f.name) != f.default]):
            raise InputError(f"--{changed[0].replace('_', '-')} says how to learn; give --learn too")
        check(self)

    def settings(self) -> OnlineSettings:
        """The same for Python. Raises InputError for a wrong value."""
        from outrider.training.online.pupil import OnlineSettings

        settings: dict[str, Any] = {
            "interval": self.learn_interval,
            "learning_rate": self.learn_rate,
            "divergence": self.learn_divergence,
            "in_thread": self.learn_in_thread,
            "snapshots": self.learn_snapshots,
        }
        return OnlineSettings(**{name: value for name, value in settings.items() if value is not None})

    def check(self, setup: Setup) -> None:
        """Raise InputError if the drafter of a setup cannot learn, before anything is loaded."""
        if self.learn:
            from outrider.training.online.learning import check_setup

            self.settings()
            check_setup(setup)

    def begin(self, engine: Engine, *, serves: bool = False) -> Learning | None:
        """Let an engine's draft model learn; None if it shall not.

        Args:
            serves: Whether a server learns: beside its requests, and on from the newest snapshot in the folder.
        """
        if not self.learn:
            return None
        from outrider.training.online.learning import Learning
        from outrider.training.online.routing import Clusters

        count = 1 if self.learn_drafts is None else self.learn_drafts
        route = Clusters.of(engine.parts.target, count) if count > 1 else None
        settings = replace(self.settings(), in_thread=True, resume=True) if serves else self.settings()
        return Learning(engine, settings, route=route, num_drafts=count)


def summary(learning: Learning, outputs: Sequence[Output]) -> str:
    """What was learnt, and the acceptance rates of the first and the last quarter of the outputs, in order of their
    ends.
    """
    drafts = [pupil.draft.num_rounds for pupil in learning.pupils]
    models = "" if len(drafts) == 1 else f" of {len(drafts)} draft models"
    line = f"learnt in {sum(drafts)} optimizer steps{models} from {len(outputs)} outputs"
    quarter = len(outputs) // 4
    if quarter:
        first, last = (_accepted(part) for part in (outputs[:quarter], outputs[-quarter:]))
        line += f": {first} in the first quarter of the outputs, {last} in the last"
    if back := sum(pupil.num_rollbacks for pupil in learning.pupils):
        line += f"; went back to earlier weights {back} times"
    if not _num_drafted(outputs[-max(1, quarter) :]):
        line += "; where nothing is drafted, nothing is learnt: --length fixed:4 always drafts"
    return line


def _accepted(outputs: Sequence[Output]) -> str:
    """The share of draft tokens that were accepted, in words. Where nothing was drafted there is none."""
    drafted = _num_drafted(outputs)
    if not drafted:
        return "nothing drafted"
    return f"{sum(output.num_accepted_tokens for output in outputs) / drafted:.0%} of draft tokens accepted"


def _num_drafted(outputs: Sequence[Output]) -> int:
    return sum(output.num_draft_tokens for output in outputs)
