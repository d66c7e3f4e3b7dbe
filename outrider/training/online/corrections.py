"""What verification teaches: the places where the target replaced a draft token, and a bounded buffer of them."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from outrider.decoding.protocol import Cycle


@dataclass(frozen=True, kw_only=True)
class Correction:
    """A place where the target rejected all draft tokens.

    Attributes:
        request: The request's id.
        drafter: Its drafter.
        tokens: Its text before the place, prompt included.
        logits: The target's raw logits of the token at the place: the logits after the last of `tokens`.
    """

    request: str
    drafter: object
    tokens: list[int]
    logits: Float[Tensor, " vocab"]


def corrections(cycle: Cycle) -> Iterator[Correction]:
    """The corrections of one step, at most one for each request.

    The accepted path of a request ends at a node. If that node has children, the target rejected them all, and the
    node's logits are what the drafter should have guessed. If it has none, the whole path was accepted: the target's
    token behind it (the bonus token) corrects nothing. A place behind an end token is no part of the output.

    References:
        Liu et al. 2023, section 3. https://arxiv.org/abs/2310.07177 (The published code takes the logits one place too
        late, and counts bonus tokens.)
    """
    draft, counts = cycle.draft, cycle.verdict.num_accepted.tolist()
    roots = draft.offsets[:-1].tolist()
    pairs = enumerate(zip(counts, roots, strict=True))
    lasts = [int(cycle.verdict.paths[i, count - 1]) if count else root for i, (count, root) in pairs]
    rejected = [i for i, last in enumerate(lasts) if draft.first_child[last] < draft.first_child[last + 1]]
    if not rejected:
        return
    drafted = draft.tokens.tolist()
    # A decoder runs in inference mode. Tensors that it makes cannot be used for training.
    with torch.inference_mode(False):
        rows = cycle.logits[torch.tensor([lasts[i] for i in rejected]).to(cycle.logits.device)].clone()
    for i, row in zip(rejected, rows, strict=True):
        state, path = cycle.states[i], [drafted[node] for node in cycle.verdict.paths[i, : counts[i]].tolist()]
        if state.request.eos_ids.isdisjoint(path):
            tokens = [*state.tokens, *path]
            yield Correction(request=state.request.id, drafter=state.drafter, tokens=tokens, logits=row)


@dataclass(kw_only=True)
class Lesson:
    """The corrections of one request; changes in place.

    Attributes:
        tokens: The request's text before its last correction.
        places: Index of each corrected token in the text, ascending. The token before a place guesses it.
        logits: The target's logits of the token at each place.
    """

    tokens: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    logits: list[Float[Tensor, " vocab"]] = field(default_factory=list)

    def recent(self, most: int) -> "Lesson":
        """The part of the lesson in the last `most` tokens of the text."""
        first = max(0, len(self.tokens) - most)
        kept = [i for i, place in enumerate(self.places) if place > first]
        return Lesson(
            tokens=self.tokens[first:],
            places=[self.places[i] - first for i in kept],
            logits=[self.logits[i] for i in kept],
        )


class Buffer:
    """The newest corrections, by request. Changes in place.

    Args:
        most: Most corrections to keep. Each holds one row of logits. The oldest go first.

    Example:
        >>> buffer = Buffer(most=2)
        >>> for tokens in ([5, 6], [5, 6, 7], [5, 6, 7, 8]):
        ...     buffer.add(Correction(request="a", drafter=None, tokens=tokens, logits=torch.zeros(9)))
        >>> [lesson] = buffer.take()
        >>> lesson.places, len(buffer)
        ([3, 4], 0)
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lessons: OrderedDict[str, Lesson] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, correction: Correction) -> None:
        """Add a correction. Its text continues the text of the request's earlier corrections.

        A step that failed behind the verification is made again, and finds its correction a second time. One is kept.
        """
        lesson = self._lessons.setdefault(correction.request, Lesson())
        if lesson.tokens == correction.tokens:
            return
        lesson.tokens = correction.tokens
        lesson.places.append(len(correction.tokens))
        lesson.logits.append(correction.logits)
        self._count += 1
        if self._count > self._most:
            self._drop()

    def take(self) -> list[Lesson]:
        """Remove and return all lessons."""
        lessons = list(self._lessons.values())
        self.clear()
        return lessons

    def clear(self) -> None:
        """Remove all lessons."""
        self._lessons, self._count = OrderedDict(), 0

    def _drop(self) -> None:
        """Remove the oldest correction of the request that was corrected first."""
        id, lesson = next(iter(self._lessons.items()))
        del lesson.places[0], lesson.logits[0]
        if not lesson.places:
            del self._lessons[id]
        self._count -= 1
