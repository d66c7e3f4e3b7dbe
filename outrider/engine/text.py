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

    A stop string counts if it ends behind the first `min_tokens` tokens, wherever it begins. The one that ends first
    ends the text, and of those that end together the longest. So the text does not depend on how it is split into
    tokens. Text that could still become a stop string is held back until it cannot.

    Args:
        tokenizer: None gives no text.
        stop: Strings that end the text; it ends before the string, and the token that completes it is kept.
        include_stop: Whether the text ends behind that string instead.
        end_tokens: Tokens that end the output. They give no text, unless `include_stop` is given.
        min_tokens: No stop string ends in the text of so many first tokens.
        hidden: None hands out text without special tokens. Otherwise they give text as well, all but these. Stop
            strings are looked for in the text without them.

    Attributes:
        text: All text so far, without special tokens.
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
        min_tokens: int = 0,
        hidden: Collection[int] | None = None,
    ) -> None:
        self.text = ""
        self.stopped_by: str | None = None
        self._include_stop = include_stop
        self._silent = frozenset[int]() if include_stop else frozenset(end_tokens)
        self._stream = None if tokenizer is None else TextStream(tokenizer)
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._taken = 0
        self._full = None if tokenizer is None or hidden is None else FullText(tokenizer, frozenset(hidden))

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text."""
        return self.stopped_by is not None

    def keep(self, tokens: Sequence[int]) -> int:
        """How many of the new tokens belong to the output; their text is added."""
        if self._stream is None:
            return len(tokens)
        if not self._stop and self._full is None:
            self.text += self._stream.push(*self._spoken(tokens))
            return len(tokens)
        for i, token in enumerate(tokens, 1):
            self._num_tokens += 1
            spoken = self._spoken((token,))
            piece = self._stream.push(*spoken)
            if self._full is not None:
                self._full.push(spoken, len(self.text) + len(piece))
            if self._add(piece):
                return i
        return len(tokens)

    def take(self) -> str:
        """Text that has become certain since the last call."""
        end = len(self.text)
        if not self.stopped:
            end -= max((self._begun(stop) for stop in self._stop), default=0)
        if self._full is not None:
            behind = self.stopped and self._include_stop
            return self._full.take(end, behind=behind, whole=not self.stopped and end == len(self.text))
        fresh, self._taken = self.text[self._taken : end], max(end, self._taken)
        return fresh

    def finish(self) -> str:
        """The rest of the text, once no token will follow."""
        if self._stream is not None and not self.stopped:
            piece = self._stream.finish()
            if self._full is not None:
                self._full.finish(len(self.text) + len(piece))
            self._add(piece)
        self._stop = ()
        return self.take()

    def _spoken(self, tokens: Sequence[int]) -> Sequence[int]:
        """The tokens that give text."""
        return [token for token in tokens if token not in self._silent] if self._silent else tokens

    def _add(self, piece: str) -> bool:
        """Append text; whether a stop string ends in it, in which case the text is cut before that string."""
        before = len(self.text)
        self.text += piece
        if self._num_tokens <= self._min_tokens:
            return False
        matches = []
        for stop in self._stop:
            if (at := self.text.find(stop, max(0, before - len(stop) + 1))) >= 0:
                matches.append((at + len(stop), at, stop))
        if matches:
            end, start, self.stopped_by = min(matches)
            self.text = self.text[: end if self._include_stop else start]
        return self.stopped

    def _begun(self, stop: str) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        return next((size for size in range(len(stop) - 1, 0, -1) if self.text.endswith(stop[:size])), 0)


class FullText:
    """The text of an output with special tokens, handed out up to a place of the text without them.

    Args:
        hidden: Special tokens that give no text here either.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, hidden: frozenset[int]) -> None:
        self._stream = TextStream(tokenizer, special=True)
        self._hidden = hidden
        self._text = ""
        self._taken = 0
        # Behind each token: the length of the text without special tokens, and of this one.
        self._places: list[tuple[int, int]] = []
        self._before = (0, 0)

    def push(self, tokens: Sequence[int], size: int) -> None:
        """Add the text of tokens.

        Args:
            size: Characters of the text without special tokens, with these.
        """
        self._text += "".join(self._stream.push(token) for token in tokens if token not in self._hidden)
        self._places.append((size, len(self._text)))

    def finish(self, size: int) -> None:
        """Add what is held back. `size` is as in `push`."""
        self._text += self._stream.finish()
        self._places.append((size, len(self._text)))

    def take(self, end: int, *, behind: bool, whole: bool) -> str:
        """The text before a place, without what was taken before.

        Args:
            end: The place, in characters of the text without special tokens.
            behind: Whether special tokens between the character before the place and the one behind it are left out.
            whole: Whether the place is the end of the text so far, special tokens behind it included.
        """
        while self._places and (self._places[0][0] < end or (self._places[0][0] == end and not behind)):
            self._before = self._places.pop(0)
        size, at = self._before
        stop = len(self._text) if whole else at + end - size
        if self._places:
            stop = min(stop, self._places[0][1])
        fresh, self._taken = self._text[self._taken : stop], max(stop, self._taken)
        return fresh
