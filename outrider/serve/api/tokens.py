"""Token ids as the texts and bytes that answers show."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from transformers import PreTrainedTokenizerBase

from outrider.engine.text import TextStream
from outrider.lm.vocabulary import spellings

LEAST = -9999.0
"""What stands for a log-probability of minus infinity, which JSON has no number for."""


class OldLogprobs(TypedDict):
    """The log-probabilities of a completion."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(TypedDict):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token of an output, with the likeliest ones at its place."""

    top_logprobs: list[TopLogprob]


class Offsets:
    """Where tokens begin in a text, as it grows. A token that is a part of a character begins where the
    character does.

    Args:
        special: Whether special tokens give text.
        start: Characters before the first token.

    Example:
        >>> from tokenizers import Tokenizer, decoders, models
        >>> from transformers import PreTrainedTokenizerFast
        >>> words = Tokenizer(models.WordLevel({"two": 0, "Ã": 1, "©": 2}, unk_token="two"))
        >>> words.decoder = decoders.ByteLevel()
        >>> Offsets(PreTrainedTokenizerFast(tokenizer_object=words), special=False).add([0, 1, 2, 0])
        [0, 3, 3, 4]
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, special: bool, start: int = 0) -> None:
        self._stream = TextStream(tokenizer, special=special)
        self.end = start

    def add(self, tokens: Sequence[int]) -> list[int]:
        """The offset of each of some more tokens."""
        offsets = []
        for token in tokens:
            offsets.append(self.end)
            self.end += len(self._stream.push(token))
        return offsets


class Vocabulary:
    """The text and the bytes of each token.

    Args:
        size: Width of the target's logits.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int) -> None:
        self._spellings = spellings(tokenizer, size)

    def text(self, token: int, as_id: bool = False) -> str:
        """The token's text. Bytes that are no character by themselves become replacement characters.

        Args:
            as_id: Write `token_id:5` instead.
        """
        if as_id:
            return f"token_id:{token}"
        spelling = self._spellings[token] if 0 <= token < len(self._spellings) else None
        return spelling.decode(errors="replace") if isinstance(spelling, bytes) else spelling or ""

    def bytes(self, token: int) -> list[int] | None:
        """The token's bytes; None of a special token."""
        spelling = self._spellings[token]
        return list(spelling) if isinstance(spelling, bytes) else None

    def old_logprobs(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float | None],
        top: Sequence[Mapping[int, float] | None],
        *,
        offsets: Sequence[int],
        as_ids: bool,
    ) -> OldLogprobs:
        """Log-probabilities as completions have them. The token itself is always among the likeliest ones.

        Of several tokens with one text the likeliest counts, so that a token is the greedy choice exactly where its
        log-probability is the largest one.

        Args:
            logprobs: Of each token; None for the first of a prompt.
            top: Of the likeliest tokens at each place.
            offsets: Where each token begins in the text that the client gets.
        """
        lists = OldLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=list(offsets))
        for token, logprob, others in zip(tokens, logprobs, top, strict=True):
            text = self.text(token, as_ids)
            lists["tokens"].append(text)
            lists["token_logprobs"].append(None if logprob is None else bounded(logprob))
            if logprob is None:
                lists["top_logprobs"].append(None)
                continue
            best: dict[str, float] = {}
            for id, value in ({token: logprob} | dict(others or {})).items():
                name = self.text(id, as_ids)
                best[name] = max(bounded(value), best.get(name, LEAST))
            lists["top_logprobs"].append(best)
        return lists

    def logprobs(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        top: Sequence[Mapping[int, float]],
        *,
        count: int,
        as_ids: bool,
    ) -> list[TokenLogprob]:
        """Log-probabilities as chat completions have them.

        Args:
            count: How many of the likeliest tokens are listed.
        """
        return [
            TokenLogprob(
                **self._one(token, logprob, as_ids),
                top_logprobs=[self._one(id, value, as_ids) for id, value in _best(others, count)],
            )
            for token, logprob, others in zip(tokens, logprobs, top, strict=True)
        ]

    def prompt_logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[float | None], top: Sequence[Mapping[int, float] | None]
    ) -> list[dict[str, Any] | None]:
        """Log-probabilities of a prompt as vLLM has them: by token id, with ranks."""
        entries: list[dict[str, Any] | None] = []
        for token, logprob, others in zip(tokens, logprobs, top, strict=True):
            if logprob is None:
                entries.append(None)
                continue
            ranked = _best(others or {}, len(others or {}))
            entry: dict[str, Any] = {
                str(id): {"logprob": bounded(value), "rank": i, "decoded_token": self.text(id)}
                for i, (id, value) in enumerate(ranked, 1)
            }
            entry.setdefault(str(token), {"logprob": bounded(logprob), "rank": None, "decoded_token": self.text(token)})
            entries.append(entry)
        return entries

    def _one(self, token: int, logprob: float, as_id: bool) -> TopLogprob:
        return TopLogprob(token=self.text(token, as_id), logprob=bounded(logprob), bytes=self.bytes(token))


def bounded(logprob: float) -> float:
    """A log-probability that JSON can hold.

    Example:
        >>> bounded(-0.5), bounded(float("-inf")), bounded(float("nan"))
        (-0.5, -9999.0, -9999.0)
    """
    return logprob if logprob >= LEAST else LEAST


def _best(top: Mapping[int, float], count: int) -> list[tuple[int, float]]:
    return sorted(top.items(), key=lambda each: -each[1])[:count]
