"""A corpus: texts as token ids, read once, kept on disk, and looked up by number."""

import hashlib
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np

from outrider.core.conversations import RecordShape, taken_for
from outrider.core.option import Bounds
from outrider.core.types import InputError
from outrider.learning.batch import Document

TOKEN = np.dtype(np.int32)
"""How a token id is kept."""


class Corpus(Sequence[Document]):
    """Documents by number. Their tokens are in a temporary file, so that memory does not grow with the texts.

    Attributes:
        num_tokens: Tokens of all documents.
        max_tokens: Most tokens that were kept of a document; None kept all.
        num_cut: Documents that were longer than `max_tokens`.
        num_dropped: Documents that were left out.
        taken_for: What the records were taken for, in words; empty if that is not known.

    Args:
        documents: The documents; each is read once.
        max_tokens: Most tokens to keep of a document.
        learnable: Leave out documents that have no token to learn, after they are cut.
        taken: How many records were taken for what; it is filled while the documents are read.

    Raises:
        InputError: There is no document, or the temporary file cannot be written.

    Example:
        >>> corpus = Corpus([Document(tokens=np.array([5, 6, 7]), start=1), Document(tokens=np.array([8]), start=0)])
        >>> len(corpus), corpus.num_tokens, corpus[0].tokens.tolist(), corpus[-1].tokens.tolist()
        (2, 4, [5, 6, 7], [8])
    """

    def __init__(
        self,
        documents: Iterable[Document],
        *,
        max_tokens: int | None = None,
        learnable: bool = False,
        taken: Counter[RecordShape] | None = None,
    ) -> None:
        Bounds(least=2).check("max_tokens", max_tokens)
        self.max_tokens, self.num_cut, self.num_dropped = max_tokens, 0, 0
        borders, starts = [0], []
        self._domains: list[str | None] = []
        try:
            # The file has no name. It is gone when the corpus is.
            with tempfile.TemporaryFile() as file:
                for document in documents:
                    kept = document.tokens[:max_tokens]
                    self.num_cut += len(kept) < len(document.tokens)
                    if learnable and max(document.start, 1) >= len(kept):
                        self.num_dropped += 1
                        continue
                    file.write(np.ascontiguousarray(kept, dtype=TOKEN).data)
                    borders.append(borders[-1] + len(kept))
                    starts.append(min(document.start, len(kept)))
                    self._domains.append(document.domain)
                file.flush()
                empty = np.zeros(0, dtype=TOKEN)
                self._tokens = np.memmap(file, dtype=TOKEN, mode="r") if borders[-1] else empty
        except OSError as error:
            raise InputError(
                f"the corpus cannot be kept in {tempfile.gettempdir()}: {error.strerror}; set TMPDIR to a folder with "
                "more space"
            ) from error
        if not starts:
            dropped = f": none of its {self.num_dropped} documents has a token to learn" if self.num_dropped else ""
            raise InputError(f"the corpus is empty{dropped}")
        self.taken_for = taken_for(taken or Counter(), answers_first=not learnable)
        self.num_tokens = borders[-1]
        self._borders, self._starts = np.array(borders), np.array(starts)

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, number: int) -> Document: ...
    @overload
    def __getitem__(self, number: slice) -> list[Document]: ...
    def __getitem__(self, number: int | slice) -> Document | list[Document]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        place = number + len(self) if number < 0 else number
        if not 0 <= place < len(self):
            raise IndexError(number)
        tokens = np.array(self._tokens[self._borders[place] : self._borders[place + 1]], dtype=np.int64)
        return Document(tokens=tokens, start=int(self._starts[place]), domain=self._domains[place])

    def __str__(self) -> str:
        text = f"{len(self):,} documents with {self.num_tokens:,} tokens"
        if self.num_cut:
            text += f"; {self.num_cut:,} were longer than {self.max_tokens:,} tokens and were cut"
        if self.num_dropped:
            text += f"; {self.num_dropped:,} had no token to learn and were left out"
        return text


def fingerprint_of(documents: Iterable[Document]) -> str:
    """A hash of the tokens and the starts of all documents, in order."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(np.array([len(document.tokens), document.start], dtype=np.int64).tobytes())
        digest.update(np.ascontiguousarray(document.tokens, dtype=TOKEN).tobytes())
    return digest.hexdigest()[:32]
