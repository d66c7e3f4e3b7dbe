"""An n-gram language model that backs off to shorter contexts: counted on texts, kept in one file of tensors."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors import safe_open
from safetensors.torch import save_file

from outrider.core import files
from outrider.core.types import InputError

FILE = "ngram.safetensors"
"""The file's name beside a head."""
MOST_TOKENS = 20_000_000
"""Tokens of texts that are counted; the first ones."""
USUAL_DISCOUNT = 0.5
"""The discount where no n-gram was seen once."""


@dataclass(frozen=True, kw_only=True, eq=False)
class BackoffModel:
    r"""With $c(h w)$ the count of token $w$ behind the tokens $h$, and $h'$ as $h$ without its first token,

    $P(w \mid h) = \frac{\max(c(h w) - D, 0)}{c(h)} + b(h)\,P(w \mid h')$, where $b(h)$ makes the sum over $w$ one.

    This is absolute discounting with interpolation. An n-gram that was seen too rarely counts 0. Without a context,
    $P(w) = (c(w) + 1) / (N + V)$. If $h$ was not seen, $P(w \mid h) = P(w \mid h')$.

    The n-grams of order m are numbered by their keys: the number of the first m - 1 tokens among the n-grams of order
    m - 1, times the size of the vocabulary, plus the last token. The number of a single token is its id.

    Attributes:
        vocab_size: Tokens are 0 to this.
        keys: The keys of the n-grams of order 2, 3, ..., ascending.
        logs: For each order from 1 on, $\log P$ of every n-gram's last token behind the others.
        rests: For each order from 1 on but the last, $\log b$ of every n-gram as a context.

    References:
        Ney, Essen and Kneser 1994, On structuring probabilistic dependences in stochastic language modelling.
    """

    vocab_size: int
    keys: tuple[Int[np.ndarray, " _"], ...]
    logs: tuple[Float[np.ndarray, " _"], ...]
    rests: tuple[Float[np.ndarray, " _"], ...]

    @property
    def order(self) -> int:
        """Most tokens of an n-gram."""
        return len(self.logs)

    def score(
        self, contexts: Int[np.ndarray, "n width"], tokens: Int[np.ndarray, "n choices"]
    ) -> Float[np.ndarray, "n choices"]:
        r"""$\log P$ of tokens behind contexts.

        Args:
            contexts: The tokens before, the newest last; -1 where there is none. At most `order - 1` of them count.

        Example:
            >>> model = BackoffModel.count([np.array([1, 2, 1, 2, 1, 3])], vocab_size=4, order=2, least=1)
            >>> model.score(np.array([[1]]), np.arange(4)[None]).round(2).tolist()
            [[-4.32, -2.93, -0.45, -1.23]]
        """
        scores = self.logs[0][tokens].astype(np.float64)
        for length in range(1, min(self.order, contexts.shape[1] + 1)):
            place = self._place(contexts[:, contexts.shape[1] - length :])[:, None]
            rest = np.where(place >= 0, self._at(self.rests[length - 1], place), 0.0)
            at = self._find(length - 1, place, tokens)
            scores = np.where(at >= 0, self._at(self.logs[length], at), rest + scores)
        return scores

    @classmethod
    def count(
        cls, texts: Iterable[Int[np.ndarray, " _"]], *, vocab_size: int, order: int = 3, least: int = 2
    ) -> "BackoffModel":
        """The model of some texts.

        Args:
            order: Most tokens of an n-gram.
            least: How often an n-gram of two or more tokens must be seen to be kept.

        Raises:
            InputError: A number is below 1, the order is above 4, or a token is not in the vocabulary.
        """
        if not 1 <= order <= 4:
            raise InputError(f"the order of an n-gram model must be in 1..4, got {order}")
        if least < 1:
            raise InputError(f"the least count of an n-gram must be >= 1, got {least}")
        stream = _stream(texts)
        if stream.max(initial=-1) >= vocab_size:
            raise InputError(f"tokens must be below {vocab_size}, got {stream.max()}")
        singles = np.bincount(stream[stream >= 0], minlength=vocab_size)
        model = cls(
            vocab_size=vocab_size,
            keys=(),
            logs=(np.log((singles + 1) / (singles.sum() + vocab_size)).astype(np.float32),),
            rests=(),
        )
        places = stream
        for _ in range(order - 1):
            model, places = model._extended(stream, places, least)
        return model

    def _extended(
        self, stream: Int[np.ndarray, " _"], places: Int[np.ndarray, " _"], least: int
    ) -> tuple["BackoffModel", Int[np.ndarray, " _"]]:
        """The model with n-grams one token longer.

        Args:
            stream: All texts.
            places: The number of the n-gram that begins at each token; -1 where there is none.

        Returns:
            The model, and the numbers of the longer n-grams.
        """
        order, known = self.order + 1, len(self.logs[-1])
        last = stream[order - 1 :]
        places = places[: len(last)]
        begins = np.flatnonzero((places >= 0) & (last >= 0))
        every = places[begins] * self.vocab_size + last[begins]
        keys, first, counts = np.unique(every, return_index=True, return_counts=True)
        above = keys // self.vocab_size
        once, twice = int((counts == 1).sum()), int((counts == 2).sum())
        discount = once / (once + 2 * twice) if once and twice else USUAL_DISCOUNT
        totals, kept = np.bincount(above, weights=counts, minlength=known), counts >= least
        share = (counts[kept] - discount) / totals[above[kept]]
        rest = 1 - np.bincount(above[kept], weights=share, minlength=known)
        tokens = stream[begins[first[kept]][:, None] + np.arange(order)]
        shorter = np.exp(self.score(tokens[:, 1:-1], tokens[:, -1:])[:, 0])
        logs = np.log(share + rest[above[kept]] * shorter)
        model = BackoffModel(
            vocab_size=self.vocab_size,
            keys=(*self.keys, keys[kept]),
            logs=(*self.logs, logs.astype(np.float32)),
            rests=(*self.rests, np.log(rest).astype(np.float32)),
        )
        return model, model._find(order - 2, places, last)

    def _place(self, grams: Int[np.ndarray, "n length"]) -> Int[np.ndarray, " n"]:
        """The numbers of n-grams; -1 for those that were not seen."""
        place = grams[:, 0]
        for i in range(1, grams.shape[1]):
            place = self._find(i - 1, place, grams[:, i])
        return place

    def _find(
        self, table: int, place: Int[np.ndarray, "*n"], tokens: Int[np.ndarray, "*m"]
    ) -> Int[np.ndarray, "*most"]:
        """The numbers of n-grams, by those of their first tokens and by their last token; -1 where there is none."""
        keys, wanted = self.keys[table], place * self.vocab_size + tokens
        if not len(keys):
            return np.full(wanted.shape, -1)
        at = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
        return np.where((place >= 0) & (tokens >= 0) & (keys[at] == wanted), at, -1)

    @staticmethod
    def _at(values: Float[np.ndarray, " _"], at: Int[np.ndarray, "*n"]) -> Float[np.ndarray, "*n"]:
        return values[at] if len(values) else np.zeros(at.shape)


def write_backoff(model: BackoffModel, folder: Path) -> None:
    """Write a model to its file: `keys.m`, `logs.m` and `rests.m` for each order m."""
    tensors = {f"keys.{i + 2}": torch.from_numpy(each) for i, each in enumerate(model.keys)}
    tensors |= {f"logs.{i + 1}": torch.from_numpy(each) for i, each in enumerate(model.logs)}
    tensors |= {f"rests.{i + 1}": torch.from_numpy(each) for i, each in enumerate(model.rests)}
    about = {"order": str(model.order), "vocab_size": str(model.vocab_size)}
    with files.replaced(folder / FILE) as fresh:
        save_file(tensors, fresh, metadata=about)


def read_backoff(file: str) -> BackoffModel:
    """The model of a file. Raises InputError if it is damaged."""
    try:
        with safe_open(file, framework="numpy") as opened:
            about = opened.metadata() or {}
            order, tensors = int(about["order"]), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        model = BackoffModel(
            vocab_size=int(about["vocab_size"]),
            keys=tuple(tensors[f"keys.{m}"] for m in range(2, order + 1)),
            logs=tuple(tensors[f"logs.{m}"] for m in range(1, order + 1)),
            rests=tuple(tensors[f"rests.{m}"] for m in range(1, order)),
        )
    except Exception as error:
        raise InputError(f"{file} holds no n-gram model; train the heads again") from error
    counts = [each.shape for each in model.logs]
    fits = [each.shape for each in model.keys] == counts[1:] and [each.shape for each in model.rests] == counts[:-1]
    if not fits or counts[:1] != [(model.vocab_size,)] or any(np.isnan(each).any() for each in model.logs):
        raise InputError(f"the tables of the n-gram model in {file} do not fit each other; train the heads again")
    return model


def _stream(texts: Iterable[Int[np.ndarray, " _"]]) -> Int[np.ndarray, " _"]:
    """Texts one after the other, with -1 behind each."""
    parts: list[Int[np.ndarray, " _"]] = [np.zeros(0, dtype=np.int64)]
    left = MOST_TOKENS
    for text in texts:
        if left <= 0:
            break
        parts += [text[:left].astype(np.int64), np.array([-1])]
        left -= len(text)
    return np.concatenate(parts)
