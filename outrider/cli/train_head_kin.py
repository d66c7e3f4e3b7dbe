"""outrider train poss, griffin, jakiro: train a head on the trunk of EAGLE or EAGLE-3."""

from dataclasses import asdict
from typing import Any

from outrider.cli.head_options import EagleOptions, taps_of
from outrider.cli.kin_options import GriffinOptions, JakiroOptions, PossOptions
from outrider.cli.train_head import Given, Task, run_head
from outrider.core.types import InputError
from outrider.training.griffin import Griffin, griffin_learner
from outrider.training.jakiro import Jakiro, jakiro_learner
from outrider.training.poss import PossEagle, PossEagle3, poss_learner


def run_poss(task: Task, head: PossOptions) -> None:
    """Train a head with position specialists."""
    if head.trunk == "eagle":
        _refuse_few(task, "an EAGLE head with specialists")
    taps = taps_of(head.taps)

    def make(given: Given) -> PossEagle | PossEagle3:
        return poss_learner(given.target, ids=given.ids, **{**asdict(head), "taps": taps}, **_shared(task, given))

    run_head(task, "poss", make, about=asdict(head))


def run_griffin(task: Task, trunk: EagleOptions, head: GriffinOptions) -> None:
    """Train a GRIFFIN head."""
    _refuse_few(task, "a GRIFFIN head")
    about = asdict(trunk) | asdict(head)

    def make(given: Given) -> Griffin:
        return griffin_learner(given.target, **about, **_shared(task, given))

    run_head(task, "griffin", make, about=about)


def run_jakiro(task: Task, trunk: EagleOptions, head: JakiroOptions) -> None:
    """Train a Jakiro head."""
    _refuse_few(task, "a Jakiro head")
    about = asdict(trunk) | asdict(head)
    del about["intermediate_size"]

    def make(given: Given) -> Jakiro:
        return jakiro_learner(given.target, **about, **_shared(task, given))

    run_head(task, "jakiro", make, about=about)


def _shared(task: Task, given: Given) -> dict[str, Any]:
    """What every learner is told."""
    return {
        "loss": given.loss,
        "decay": task.options.decay,
        "begin": task.options.begin,
        "seed": task.settings.seed,
        "device": given.device,
    }


def _refuse_few(task: Task, what: str) -> None:
    if task.options.draft_vocab is not None:
        raise InputError(
            f"{what} guesses with the target's own output layer; draft-vocab is for eagle3, medusa and poss with "
            "trunk eagle3"
        )
