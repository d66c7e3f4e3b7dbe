"""Tokens and words that outputs must not hold: constraints without a grammar."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from outrider.core.constraint import Constraint
from outrider.core.sampling import pack
from outrider.core.types import InputError


@dataclass(frozen=True, kw_only=True, eq=False)
class AllowedTokens:
    """Only these tokens may come.

    Attributes:
        row: The tokens, as a packed mask.

    Example:
        >>> AllowedTokens.of([0, 2], vocab_size=4).masks(None, [7], [-1])
        tensor([[5]], dtype=torch.int32)
    """

    row: Int[Tensor, " words"]

    @classmethod
    def of(cls, tokens: Iterable[int], vocab_size: int) -> "AllowedTokens":
        """The constraint for some token ids, all below the size of the vocabulary."""
        allowed = torch.zeros(1, vocab_size, dtype=torch.bool)
        allowed[0, list(tokens)] = True
        return cls(row=pack(allowed)[0])

    def open(self) -> None:
        return None

    def masks(self, state: object, tokens: Sequence[int], parents: Sequence[int]) -> Int[Tensor, "nodes words"]:
        return self.row.expand(len(tokens), -1)

    def commit(self, state: object, tokens: Sequence[int]) -> None:
        return


@dataclass(frozen=True, kw_only=True, eq=False)
class BadWords:
    """Some sequences of tokens may not stand in the output. What the prompt ends with does not count.

    A sequence is kept out by forbidding its last token wherever the tokens before it stand.

    Attributes:
        sequences: The sequences, none of them empty.
        vocab_size: Width of the logits.

    Example:
        >>> words = BadWords(sequences=((1,), (0, 2)), vocab_size=4)
        >>> state = words.open()
        >>> words.masks(state, [3, 0], [-1, 0])  # of 0 .. 3: after 3 not 1, after 0 neither 1 nor 2
        tensor([[13],
                [ 9]], dtype=torch.int32)
    """

    sequences: tuple[tuple[int, ...], ...]
    vocab_size: int

    def open(self) -> list[int]:
        """The newest tokens of the output, as many as may begin a sequence."""
        return []

    def masks(self, state: object, tokens: Sequence[int], parents: Sequence[int]) -> Int[Tensor, "nodes words"]:
        allowed = torch.ones(len(tokens), self.vocab_size, dtype=torch.bool)
        texts: list[tuple[int, ...]] = []
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            # The newest token of the output, which the root holds, is in the state already.
            texts.append((*texts[parent], token) if parent >= 0 else tuple(_newest(state)))
            for *before, last in self.sequences:
                if not before or texts[node][-len(before) :] == tuple(before):
                    allowed[node, last] = False
        return pack(allowed)

    def commit(self, state: object, tokens: Sequence[int]) -> None:
        newest = _newest(state)
        newest += tokens
        del newest[: max(0, len(newest) - max(map(len, self.sequences)) + 1)]


@dataclass(frozen=True, kw_only=True, eq=False)
class AllOf:
    """Several constraints at once.

    Attributes:
        constraints: At least one.
    """

    constraints: tuple[Constraint, ...]

    def open(self) -> list[object]:
        """The state of each."""
        return [each.open() for each in self.constraints]

    def masks(self, state: object, tokens: Sequence[int], parents: Sequence[int]) -> Int[Tensor, "nodes words"]:
        masks = [each.masks(each_state, tokens, parents) for each, each_state in self._with(state)]
        both = masks[0].clone()
        for other in masks[1:]:
            both &= other
        return both

    def commit(self, state: object, tokens: Sequence[int]) -> None:
        for each, each_state in self._with(state):
            each.commit(each_state, tokens)

    def _with(self, state: object) -> list[tuple[Constraint, object]]:
        if not isinstance(state, list):
            raise TypeError(f"several constraints keep a list of states, got {type(state).__name__}")
        return list(zip(self.constraints, state, strict=True))


def bad_words(words: str | Sequence[str], tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> BadWords:
    """The constraint that keeps words out of an output, at the beginning of a text and behind a space.

    A word that the output spells with other tokens than the tokenizer does is not noticed; vLLM's option of this name
    has the same meaning.

    Raises:
        InputError: There is no tokenizer, or a word makes no tokens.
    """
    if tokenizer is None:
        raise InputError("bad_words need the target's tokenizer")
    sequences = list[tuple[int, ...]]()
    for word in [words] if isinstance(words, str) else words:
        if not isinstance(word, str) or not word.strip():
            raise InputError(f"bad_words must be texts that are not empty, got {word!r}")
        forms = (word.lstrip(), f" {word.lstrip()}")
        sequences += [tuple(tokenizer(form, add_special_tokens=False)["input_ids"]) for form in forms]
    fitting = (tokens for tokens in sequences if tokens and max(tokens) < vocab_size)
    return BadWords(sequences=tuple(dict.fromkeys(fitting)), vocab_size=vocab_size)


def _newest(state: object) -> list[int]:
    if not isinstance(state, list):
        raise TypeError(f"bad words keep a list of tokens, got {type(state).__name__}")
    return state
