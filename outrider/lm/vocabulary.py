"""The map between two vocabularies: tokens that spell the same bytes, and the pieces of all other tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase

Spelling = bytes | str | None
"""The bytes of an ordinary token, the name of a special one, None where an id has no token."""


@dataclass(frozen=True, kw_only=True)
class Translation:
    """The map from a target's tokens to a draft model's tokens.

    Attributes:
        vocab_size: Width of the target's logits.
        ours: Target ids of the tokens that both have.
        theirs: The draft model's id of each of them.
        pieces: The draft model's ids, at least one, for any target id.
        opening: The draft model's ids that it expects before any text.

    Example:
        >>> swap = Translation(vocab_size=2, ours=np.array([0, 1]), theirs=np.array([1, 0]), pieces=lambda t: (1 - t,))
        >>> swap.share
        1.0
    """

    vocab_size: int
    ours: Int[np.ndarray, " shared"]
    theirs: Int[np.ndarray, " shared"]
    pieces: Callable[[int], tuple[int, ...]]
    opening: tuple[int, ...] = ()

    @property
    def share(self) -> float:
        """Share of the target's ids that both have."""
        return len(self.ours) / self.vocab_size


def translation(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, vocab_size: int, draft_size: int
) -> Translation:
    """Compare two vocabularies.

    Ordinary tokens are shared where they spell the same bytes, special ones where they have the same name; the tokens
    that end and begin a text stand for each other whatever their names. Shared tokens are pairs: of several that spell
    the same, the lowest id counts.

    Args:
        vocab_size: Width of the target's logits.
        draft_size: Width of the draft model's.

    References:
        Timor et al. 2025, token-level intersection, Algorithm 4. https://arxiv.org/abs/2502.05202
    """
    target_spellings, draft_spellings = spellings(target, vocab_size), spellings(draft, draft_size)
    place: dict[Spelling, int] = {
        spelling: id for id, spelling in reversed(list(enumerate(draft_spellings))) if spelling is not None
    }
    candidates = [
        (target.eos_token_id, draft.eos_token_id),
        (target.bos_token_id, draft.bos_token_id),
        *((id, place.get(spelling)) for id, spelling in enumerate(target_spellings) if spelling is not None),
    ]
    pairs: dict[int, int] = {}
    taken: set[int] = set()
    for ours, theirs in candidates:
        if ours is None or theirs is None or ours >= vocab_size or theirs >= draft_size:
            continue
        if ours not in pairs and theirs not in taken:
            pairs[ours] = theirs
            taken.add(theirs)
    begins = [id for id in (draft.bos_token_id, draft.eos_token_id) if id is not None]
    unknown = next((id for id in (draft.unk_token_id, *begins, draft.pad_token_id) if id is not None), 0)
    known: dict[int, tuple[int, ...]] = {ours: (theirs,) for ours, theirs in pairs.items()}
    if target.bos_token_id is not None and begins:
        known.setdefault(target.bos_token_id, (begins[0],))
    shared = np.array(sorted(pairs), dtype=np.int64)
    return Translation(
        vocab_size=vocab_size,
        ours=shared,
        theirs=np.array([pairs[id] for id in shared.tolist()], dtype=np.int64),
        pieces=_Speller(
            target_spellings=target_spellings,
            draft_spellings=draft_spellings,
            place=place,
            tokenizer=draft,
            unknown=unknown,
            known=known,
        ),
        opening=_opening(draft),
    )


def spellings(tokenizer: PreTrainedTokenizerBase, size: int) -> list[Spelling]:
    """The bytes or the name of each id below `size`.

    Byte-level vocabularies write each byte as one letter. SentencePiece's write a space as ▁, and bytes for which they
    have no other token as <0x0A>; where there is another, the byte's token is never used and keeps its name.
    """
    spelt: list[Spelling] = [None] * size
    letters = _letters() if "ByteLevel" in _decoder(tokenizer) else {}
    added, single = tokenizer.added_tokens_decoder, {}
    for text, id in tokenizer.get_vocab().items():
        if id >= size:
            continue
        if id in added:
            spelt[id] = text if added[id].special else text.encode()
        elif letters and all(letter in letters for letter in text):
            spelt[id] = bytes(letters[letter] for letter in text)
        elif not letters and len(text) == 6 and text.startswith("<0x"):
            spelt[id] = text
            single[id] = bytes.fromhex(text[3:5])
        else:
            spelt[id] = (text if letters else text.replace("▁", " ")).encode()
    ordinary = set(spelt)
    for id, byte in single.items():
        if byte not in ordinary:
            spelt[id] = byte
    return spelt


@dataclass(frozen=True, kw_only=True)
class _Speller:
    """Spells single target tokens in the draft model's vocabulary, with a cache."""

    target_spellings: Sequence[Spelling]
    draft_spellings: Sequence[Spelling]
    place: Mapping[Spelling, int]
    tokenizer: PreTrainedTokenizerBase
    unknown: int
    known: dict[int, tuple[int, ...]] = field(default_factory=dict, compare=False)

    def __call__(self, token: int) -> tuple[int, ...]:
        if token not in self.known:
            spelling = self.target_spellings[token]
            text = spelling.encode() if isinstance(spelling, str) else spelling or b""
            self.known[token] = self._cut(text) or self._longest(text) or (self.unknown,)
        return self.known[token]

    def _cut(self, text: bytes) -> tuple[int, ...]:
        """As the draft model's tokenizer cuts the text; nothing where that says more, such as a space before it."""
        try:
            ids = tuple(self.tokenizer(text.decode(), add_special_tokens=False)["input_ids"])
        except UnicodeDecodeError:
            return ()
        cut = [self.draft_spellings[id] if id < len(self.draft_spellings) else None for id in ids]
        return ids if b"".join(s for s in cut if isinstance(s, bytes)) == text else ()

    def _longest(self, text: bytes) -> tuple[int, ...]:
        """The longest token that the text begins with, again and again; nothing where some byte has none."""
        ids: list[int] = []
        while text:
            size = next((size for size in range(len(text), 0, -1) if text[:size] in self.place), 0)
            if size == 0:
                return ()
            ids.append(self.place[text[:size]])
            text = text[size:]
        return tuple(ids)


def _decoder(tokenizer: PreTrainedTokenizerBase) -> str:
    """What a tokenizer of the tokenizers library says of its decoder; nothing for others."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    return "" if decoder is None else str(decoder.__getstate__())


def _letters() -> dict[str, int]:
    """The byte of each letter of byte-level vocabularies: its own number, or the rest of the bytes in order."""
    alphabet = sorted(ByteLevel.alphabet())
    plain = {letter: ord(letter) for letter in alphabet if ord(letter) < 256}
    rest = (byte for byte in range(256) if byte not in plain.values())
    return plain | dict(zip((letter for letter in alphabet if letter not in plain), rest, strict=True))


def _opening(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    begin = tokenizer.bos_token_id
    return (begin,) if begin is not None and list(tokenizer("")["input_ids"][:1]) == [begin] else ()
