"""What the export to an engine consists of, beside the checkpoint."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.handoff.handed import Handed


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine to which drafters are handed.

    Attributes:
        title: Its name in sentences.
        launch: The lines of the script that starts it.
        losses: What is lost there, a sentence each.
        check: The file in `outrider/handoff/checks` that decodes with it.
        digests_first: Whether the prompt's own forward says the first token, without a draft.
        tree: Whether it verifies drafts that branch, for drafters of this method.
    """

    title: str
    launch: Callable[[Handed], Sequence[str]]
    losses: Callable[[Handed], Sequence[str]]
    check: str
    digests_first: bool = True
    tree: Callable[[Handed], bool] = lambda handed: False
