"""A text that a client predicts for the output: where the output stands in it, and what a draft copies from it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.core.types import Request
from outrider.drafters.protocol import Promise

MATCH = 2
"""Tokens of the output's end that must stand in the prediction before drafts follow it again."""
PREDICTED = 16
"""As how many matching tokens a text counts that its client predicts."""


@dataclass(kw_only=True)
class PredictedText:
    """The predicted text of one request; changes in place.

    Drafts copy the prediction from its beginning, as long as the output agrees with it. After a difference they go on
    behind the next place where the prediction has the newest tokens of the output.

    Attributes:
        tokens: The prediction.
        first: Position of the output's first token in the context.
        seen: Tokens of the context that have been compared.
        place: Where in the prediction the next token of the output stands; -1 where that is unknown.
        furthest: Behind the last place that agreed.
        drafts: Whether the newest draft copies the prediction.
        copied: Draft tokens that were copied from it.
        accepted: Those of them that were accepted.

    Example:
        >>> prediction = PredictedText(tokens=(5, 6, 7, 8, 9), first=1, seen=1)
        >>> prediction.begin([3]), prediction.begin([3, 5, 4]), prediction.begin([3, 5, 4, 7, 8])
        (5, -1, 9)
    """

    tokens: tuple[int, ...]
    first: int
    seen: int
    place: int = 0
    furthest: int = 0
    drafts: bool = False
    copied: int = 0
    accepted: int = 0
    _ends: dict[tuple[int, ...], list[int]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, request: Request) -> "PredictedText | None":
        """The prediction of a request; None if it has none."""
        start = len(request.prompt)
        return cls(tokens=request.prediction, first=start, seen=start) if request.prediction else None

    def begin(self, context: Sequence[int]) -> int:
        """The token that the prediction has behind the context; -1 where it has none."""
        self._follow(context)
        drafted = self._token(self.place)
        self.drafts = drafted >= 0
        return drafted

    def left(self, context: Sequence[int]) -> int:
        """How many tokens the prediction has behind the context."""
        self._follow(context)
        return len(self.tokens) - self.place if self.place >= 0 else 0

    def _follow(self, context: Sequence[int]) -> None:
        """Find the place of the next token of the output."""
        for token in context[self.seen :]:
            agrees = 0 <= self.place < len(self.tokens) and self.tokens[self.place] == token
            self.place = self.place + 1 if agrees else -1
            self.furthest = max(self.furthest, self.place)
        self.seen = len(context)
        if self.place < 0 and len(context) - self.first >= MATCH:
            self.place = self._place_behind(tuple(context[-MATCH:]))

    def further(self, depth: int) -> int:
        """The token behind a node of a draft that copies the prediction; -1 where it ends.

        Args:
            depth: The node's distance from the root.
        """
        return self._token(self.place + depth)

    def commit(self, accepted: int) -> None:
        """Learn how many tokens of the newest draft were accepted."""
        if self.drafts:
            self.accepted += accepted
        self.drafts = False

    def _token(self, place: int) -> int:
        if not 0 <= place < len(self.tokens):
            return -1
        self.copied += 1
        return self.tokens[place]

    def _place_behind(self, end: tuple[int, ...]) -> int:
        """The place behind these tokens: the next one, or else the first one; -1 where there is none."""
        if not self._ends:
            for at in range(MATCH, len(self.tokens) + 1):
                self._ends.setdefault(self.tokens[at - MATCH : at], []).append(at)
        places = self._ends.get(end, ())
        return next((at for at in places if at > self.furthest), places[0] if places else -1)


def note_accepted(predictions: Sequence[PredictedText | None], paths: Sequence[Sequence[int]]) -> None:
    """Let the predictions of some requests learn the accepted paths of their drafts."""
    for prediction, path in zip(predictions, paths, strict=True):
        if prediction is not None:
            prediction.commit(len(path))


def counts(prediction: PredictedText | None) -> tuple[int, int]:
    """Draft tokens copied from a prediction: how many were accepted, and how many were not."""
    return (0, 0) if prediction is None else (prediction.accepted, prediction.copied - prediction.accepted)


def promised(prediction: PredictedText | None, context: Sequence[int], most: int) -> Promise | None:
    """What a copy of a prediction promises behind the context, of at most so many tokens; None if it goes not on."""
    left = 0 if prediction is None else prediction.left(context)
    return Promise(match=PREDICTED, tokens=min(most, left)) if left else None
