"""What is watched while a drafter learns: how many of its tokens the target would accept on held-out texts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from outrider.core.dice import Purpose, corpus_generator
from outrider.core.option import Bounds
from outrider.core.types import InputError
from outrider.learning.batch import Document, TrainBatch
from outrider.learning.learner import JudgedDrafts, Judging, Learner
from outrider.training.data.batches import Batches


@dataclass(frozen=True, kw_only=True)
class Watched:
    r"""How good a drafter is.

    Attributes:
        accepted: Probability that the first k draft tokens are accepted, for k = 1, 2, ..., at temperature 1.
        accepted_greedy: The same at temperature 0.
        num_steps: How many places the estimate is taken over.
        decoded: Tokens per step in real decoding; None if nothing was decoded.
    """

    accepted: tuple[float, ...]
    accepted_greedy: tuple[float, ...]
    num_steps: int
    decoded: float | None = None

    @property
    def block_efficiency(self) -> float:
        """Expected tokens per step of the target at temperature 1, with token verification."""
        return 1 + sum(self.accepted)

    @property
    def block_efficiency_greedy(self) -> float:
        """Expected tokens per step of the target at temperature 0."""
        return 1 + sum(self.accepted_greedy)

    def record(self) -> dict[str, Any]:
        """The figures for the log."""
        return {
            "block_efficiency": self.block_efficiency,
            "block_efficiency_greedy": self.block_efficiency_greedy,
            "accepted": list(self.accepted),
            "accepted_greedy": list(self.accepted_greedy),
            "num_places": self.num_steps,
            **({} if self.decoded is None else {"block_efficiency_decoded": self.decoded}),
        }


class Evaluation:
    r"""Measures a drafter along held-out texts, without decoding; beside that it may decode some prompts.

    At temperature 1, $P(\text{first } k \text{ draft tokens accepted}) = \sum_{x_{1..k}} \prod_j \min(p, q)(x_j) =
    E_{y \sim p}\left[\prod_{j \le k} \min(1, q(y_j)/p(y_j))\right]$, so that a text written by the target gives it
    without a draft. On other texts it is the same mean over their tokens, and no estimate of the law.

    At temperature 0, the first k tokens are accepted if the likeliest tokens of both agree k times in a row. They are
    compared after the text's own tokens. This is exact if the target wrote the text greedily, and close to it on its
    other texts.

    Every place of a text counts as the beginning of a step. A real run begins fewer steps where the drafter is good.

    Args:
        documents: Held-out texts.
        depth: Draft tokens of a step.
        max_length: Most tokens of a text.
        rows_at_once: Texts of a forward.
        temperature: Which block efficiency says what drafter is best, 1 or 0.
        decode: Decodes prompts with the learner's drafter, and gives the tokens per step; None decodes nothing.

    Raises:
        InputError: There is no text, or none with `depth` tokens to learn.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        *,
        depth: int = 5,
        max_length: int = 512,
        rows_at_once: int = 8,
        temperature: Literal[0, 1] = 1,
        decode: Callable[[Learner], float] | None = None,
    ) -> None:
        Bounds(least=1).check("depth", depth)
        if temperature not in (0, 1):
            raise InputError(f"the temperature of the watch must be 1 or 0, got {temperature}")
        # Texts are cut at the end, not at a drawn place as in training, so that every measurement sees the same tokens.
        cut = [Document(tokens=d.tokens[:max_length], start=min(d.start, max_length)) for d in documents]
        kept = [d for d in cut if len(d.tokens) - max(d.start, 1) >= depth]
        if not kept:
            raise InputError(f"no held-out text has {depth} tokens after its prompt; give more text")
        self.depth, self.temperature, self.decode = depth, temperature, decode
        self._texts = [kept[i : i + rows_at_once] for i in range(0, len(kept), rows_at_once)]

    def look(self, learner: Judging, device: torch.device | None = None) -> Watched:
        """Measure a drafter."""
        ratios, agrees = [], []
        with torch.no_grad():
            for batch in self.batches():
                judged = learner.judged(batch if device is None else batch.to(device), self.depth)
                ratios.append(judged.log_ratios)
                agrees.append(judged.agrees)
        log_ratios, equal = np.concatenate(ratios).astype(np.float64), np.concatenate(agrees)
        together = np.exp(np.cumsum(np.minimum(log_ratios, 0), 1)).mean(0)
        return Watched(
            accepted=tuple(together.tolist()),
            accepted_greedy=tuple(np.cumprod(equal, 1).mean(0).tolist()),
            num_steps=len(log_ratios),
        )

    def batches(self) -> Iterator[TrainBatch]:
        """The texts."""
        for texts in self._texts:
            longest = max(len(each.tokens) for each in texts)
            yield Batches(texts, batch_size=len(texts), max_length=max(2, longest), seed=0).batch(0)

    def score(self, watched: Watched) -> float:
        """The figure by which the best drafter is kept."""
        return watched.block_efficiency if self.temperature else watched.block_efficiency_greedy


def windows(
    log_ratios: Float[Tensor, "rows length"],
    agrees: Bool[Tensor, "rows length"],
    learnt: Bool[Tensor, "rows length"],
    depth: int,
) -> JudgedDrafts:
    """The drafts that a drafter makes along texts if its row depends on the tokens alone.

    Args:
        log_ratios: Of the text's token at each place, where it is learnt.
        agrees: Whether the likeliest tokens agree at each place, where it is learnt.
        learnt: Which places count.
        depth: Tokens of a draft.
    """
    if learnt.shape[1] < depth:
        empty = np.zeros((0, depth))
        return JudgedDrafts(log_ratios=empty, agrees=empty.astype(bool))
    whole = learnt.unfold(1, depth, 1).all(-1)
    return JudgedDrafts(
        log_ratios=log_ratios.unfold(1, depth, 1)[whole].double().cpu().numpy(),
        agrees=agrees.unfold(1, depth, 1)[whole].cpu().numpy(),
    )


@dataclass(frozen=True, kw_only=True)
class Chosen(Sequence[Document]):
    """Some documents of a corpus. They stay where the corpus keeps them."""

    documents: Sequence[Document]
    numbers: Sequence[int]

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, number: int) -> Document: ...
    @overload
    def __getitem__(self, number: slice) -> list[Document]: ...
    def __getitem__(self, number: int | slice) -> Document | list[Document]:
        if isinstance(number, slice):
            return [self.documents[i] for i in self.numbers[number]]
        return self.documents[self.numbers[number]]


def hold_out(documents: Sequence[Document], share: float, *, most: int = 200, seed: int = 0) -> tuple[Chosen, Chosen]:
    """Documents to train on, and documents to watch, drawn by the seed.

    Args:
        share: How much to hold out.
        most: Most documents to hold out.

    Raises:
        InputError: The share is not between 0 and 1, or there are fewer than two documents.
    """
    if not 0 < share < 1:
        raise InputError(f"the held-out share must be above 0 and below 1, got {share}")
    if len(documents) < 2:
        raise InputError("the corpus has one document, so none can be held out; name another file with --held-out")
    count = min(most, len(documents) - 1, max(1, round(share * len(documents))))
    held = {int(i) for i in corpus_generator(Purpose.HELD_OUT, seed=seed).permutation(len(documents))[:count]}
    order = range(len(documents))
    return (
        Chosen(documents=documents, numbers=[i for i in order if i not in held]),
        Chosen(documents=documents, numbers=[i for i in order if i in held]),
    )
