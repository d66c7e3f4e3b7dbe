"""Tokens to text as they come: UTF-8 safe, and ending exactly where a stop string begins."""

from collections.abc import Collection, Sequence

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"


class TextStream:
    """Text of a growing token sequence, however many tokens each push brings.

    Decodes a short window of newest tokens twice, with and without the new one, and hands out the difference: the text
    of a token depends on its neighbours. A character whose bytes are incomplete is held back.

    The pieces add up to what the tokenizer makes of all tokens. There is one exception: with byte fallback
    (SentencePiece), a run of bytes that turns out not to be UTF-8 would change characters that have been handed out;
    they stand.

    Args:
        tokenizer: Any transformers tokenizer.
        special: Whether special tokens give text, as parsers of tool calls want it.

    Example:
        >>> from tokenizers import Tokenizer, decoders, models
        >>> from transformers import PreTrainedTokenizerFast
        >>> words = Tokenizer(models.WordLevel({"two": 0, "Ã©": 1, "Ã": 2, "©": 3}, unk_token="two"))
        >>> words.decoder = decoders.ByteLevel()
        >>> stream = TextStream(PreTrainedTokenizerFast(tokenizer_object=words))
        >>> [stream.push(token) for token in (0, 1, 2, 3)]
        ['two', 'é', '', 'é']

    References:
        The two offsets are those of Hugging Face's text-generation-inference and of vLLM's detokenizer.
        https://github.com/vllm-project/vllm
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        # What transformers' own `decode` calls where nothing is cleaned up, at half the cost.
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._window: list[int] = []
        self._read = 0

    def push(self, *tokens: int) -> str:
        """The text that more tokens complete."""
        before = self._decode(self._window[: self._read])
        after = self._decode([*self._window, *tokens])
        if len(tokens) > 1 and after.endswith(REPLACEMENT):
            # Some of them may be complete by themselves.
            return "".join(map(self.push, tokens))
        self._window.extend(tokens)
        if after.endswith(REPLACEMENT) or len(after) <= len(before):
            return ""
        self._window = self._window[self._read :]
        self._read = len(self._window)
        return after[len(before) :]

    def finish(self) -> str:
        """The text of what is held back, with replacement characters for incomplete ones."""
        before = self._decode(self._window[: self._read])
        rest = self._decode(self._window)[len(before) :]
        self._window, self._read = [], 0
        return rest

    def _decode(self, tokens: Sequence[int]) -> str:
        if isinstance(self._backend, Tokenizer):
            return str(self._backend.decode(tokens, skip_special_tokens=not self._special))
        return str(
            self._tokenizer.decode(
                list(tokens), skip_special_tokens=not self._special, clean_up_tokenization_spaces=False
            )
        )


class Ending:
    """One request's output text and where a stop string ends it.

    Text that could still become a stop string is held back until it cannot.

    Args:
        tokenizer: None gives no text.
        stop: Strings that end the text; it ends before the first of them, and the token that completes it is kept.
        include_stop: Whether the text ends behind that string instead.
        end_tokens: Tokens that end the output. They give no text, unless `include_stop` is given.

    Attributes:
        stopped_by: The stop string that ended the text; None if none did.

    Example:
        >>> ending = Ending(None, ())
        >>> ending.keep([3, 4]), ending.take(), ending.stopped
        (2, '', False)
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        stop: Sequence[str],
        *,
        include_stop: bool = False,
        end_tokens: Collection[int] = (),
    ) -> None:
        self.text = ""
        self.stopped_by: str | None = None
        self._include_stop = include_stop
        self._silent = frozenset[int]() if include_stop else frozenset(end_tokens)
        self._stream = None if tokenizer is None else TextStream(tokenizer)
        self._stop = tuple(stop)
        self._taken = 0
        self._unchecked = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text."""
        return self.stopped_by is not None

    def keep(self, tokens: Sequence[int], unchecked: int = 0) -> int:
        """How many of the new tokens belong to the output; their text is added.

        Args:
            unchecked: In the text of so many first ones no stop string counts.
        """
        if self._stream is None:
            return len(tokens)
        if not self._stop:
            self.text += self._stream.push(*self._spoken(tokens))
            return len(tokens)
        for i, token in enumerate(tokens, 1):
            piece = self._stream.push(*self._spoken((token,)))
            if i <= unchecked:
                self.text += piece
                self._unchecked = len(self.text)
            elif self._add(piece):
                return i
        return len(tokens)

    def take(self) -> str:
        """Text that has become certain since the last call."""
        end = len(self.text)
        if not self.stopped:
            end -= max((self._begun(stop) for stop in self._stop), default=0)
        fresh, self._taken = self.text[self._taken : end], max(end, self._taken)
        return fresh

    def finish(self) -> str:
        """The rest of the text, once no token will follow."""
        if self._stream is not None and not self.stopped:
            self._add(self._stream.finish())
        self._stop = ()
        return self.take()

    def _spoken(self, tokens: Sequence[int]) -> Sequence[int]:
        """The tokens that give text."""
        return [token for token in tokens if token not in self._silent] if self._silent else tokens

    def _add(self, piece: str) -> bool:
        """Append text; whether a stop string is now complete, in which case the text is cut before it."""
        longest = max((len(stop) for stop in self._stop), default=0)
        search_from = max(self._unchecked, len(self.text) - longest + 1)
        self.text += piece
        found = [(at, stop) for stop in self._stop if (at := self.text.find(stop, search_from)) >= 0]
        if found:
            at, self.stopped_by = min(found, key=lambda each: each[0])
            self.text = self.text[: at + len(self.stopped_by) if self._include_stop else at]
        return self.stopped

    def _begun(self, stop: str) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        return next((size for size in range(len(stop) - 1, 0, -1) if self.text.endswith(stop[:size])), 0)
