"""States of a target along a corpus, in memory or in shards on disk with a manifest."""

import json
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from outrider.core import files
from outrider.core.types import InputError
from outrider.learning.batch import Document
from outrider.learning.top_rows import TopRows
from outrider.lm.fingerprint import shape_of, weights_of
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead
from outrider.training.data.batches import CapturedStates
from outrider.training.data.documents import fingerprint_of

CONVENTION = "tap k enters layer k; tap num_layers leaves the last layer, before the final norm"
"""How taps are numbered, as in `outrider/lm/hf/taps.py`. A manifest holds this text."""
MANIFEST = "manifest.json"
VERSION = 1
"""Of the layout of manifest and shards."""


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What is captured of each token.

    Attributes:
        taps: Hidden states, numbered as in `CONVENTION`.
        logits: `all` logits, a number of likeliest tokens with the mass of the rest, or None. All logits can also be
            computed from tap `num_layers`, which takes less space: see `Captured.with_logits`.

    Raises:
        InputError: Nothing is captured, or a number is too small.
    """

    taps: tuple[int, ...] = ()
    logits: int | Literal["all"] | None = None

    def __post_init__(self) -> None:
        if not self.taps and self.logits is None:
            raise InputError("nothing is captured; name taps, logits or both")
        if isinstance(self.logits, int) and self.logits < 1:
            raise InputError(f"the number of likeliest tokens must be >= 1, got {self.logits}")
        if self.taps and min(self.taps) < 0:
            raise InputError(f"taps must be >= 0, got {min(self.taps)}")


@dataclass(frozen=True, kw_only=True)
class ShardEntry:
    """A shard in the manifest.

    Attributes:
        file: Its name in the folder; empty in memory.
        lengths: Tokens of each of its documents.
    """

    file: str
    lengths: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What was captured, of which target, along which corpus.

    Attributes:
        target: Hash of the target's weights.
        corpus: Hash of the corpus.
        num_layers: Decoder layers of the target.
        vocab_size: Width of the logits.
        dtype: Of hidden states and of all logits.
        contents: What was captured.
        entries: The shards that are complete, in order.
        convention: How taps are numbered.
        version: Of the layout.
    """

    target: str
    corpus: str
    num_layers: int
    vocab_size: int
    dtype: str
    contents: Contents
    entries: tuple[ShardEntry, ...] = ()
    convention: str = CONVENTION
    version: int = VERSION

    @property
    def num_documents(self) -> int:
        """Documents in the complete shards."""
        return sum(len(entry.lengths) for entry in self.entries)

    def write(self, folder: Path) -> None:
        """Write the manifest into a folder. The old one stays until the new one is complete."""
        with files.written(folder / MANIFEST):
            folder.mkdir(parents=True, exist_ok=True)
            files.replace(folder / MANIFEST, (json.dumps(asdict(self), indent=1) + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """The manifest in a folder.

        Raises:
            InputError: There is none, or it is damaged, or it numbers taps otherwise.
        """
        file = folder / MANIFEST
        if not file.is_file():
            raise InputError(f"there are no captured states in {folder}: it has no {MANIFEST}")
        try:
            manifest = json.loads(file.read_text(encoding="utf-8"))
            convention, version = manifest["convention"], manifest["version"]
            if convention != CONVENTION or version != VERSION:
                raise InputError(
                    f"{file} numbers hidden states otherwise ({convention!r}, version {version}); capture them again"
                )
            contents = manifest.pop("contents")
            entries = [
                ShardEntry(file=each["file"], lengths=tuple(each["lengths"])) for each in manifest.pop("entries")
            ]
            return cls(
                contents=Contents(taps=tuple(contents["taps"]), logits=contents["logits"]),
                entries=tuple(entries),
                **manifest,
            )
        except InputError:
            raise
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError(f"{file} is damaged; capture the states again") from error

    def check(self, other: "Manifest", folder: Path) -> None:
        """Raise InputError unless another manifest is of the same target, corpus and contents."""
        for name, words in (("target", "another target"), ("corpus", "another corpus")):
            if getattr(self, name) != getattr(other, name):
                raise InputError(f"the shards in {folder} are of {words}; give another folder, or capture them again")
        if replace(self, entries=()) != replace(other, entries=()):
            raise InputError(
                f"the shards in {folder} hold {_words(self)}, and {_words(other)} was asked for; give another folder"
            )


@runtime_checkable
class Shard(Protocol):
    """The packed tensors of some documents."""

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Rows `first` to before `last` of a tensor."""
        ...


@dataclass(frozen=True, kw_only=True)
class MemoryShard:
    """A shard in memory."""

    tensors: Mapping[str, Tensor]

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """A view."""
        return self.tensors[name][first:last]


@dataclass(frozen=True, kw_only=True)
class FileShard:
    """A shard in a file of safetensors. Only the rows that are asked for are read."""

    path: Path

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Read rows. Raises InputError if the file is missing or damaged."""
        try:
            part: Tensor = _opened(self.path).get_slice(name)[first:last]
        except (OSError, SafetensorError) as error:
            raise InputError(f"the shard {self.path} is missing or damaged; capture the states again") from error
        return part


class Captured:
    """States of a target by the number of the document.

    Attributes:
        manifest: What was captured.

    Args:
        shards: The shards of the manifest's entries, in the same order.
        embedding_and_head: Those of the target, to compute all logits from tap `num_layers`; None does not compute
            them.
    """

    def __init__(
        self, manifest: Manifest, shards: Sequence[Shard], embedding_and_head: EmbeddingAndHead | None = None
    ) -> None:
        self.manifest, self._shards, self._embedding_and_head = manifest, shards, embedding_and_head
        # For each shard the number of its first document, and the places of its documents.
        self._firsts, self._borders = [0], []
        for entry in manifest.entries:
            self._firsts.append(self._firsts[-1] + len(entry.lengths))
            borders = [0]
            for length in entry.lengths:
                borders.append(borders[-1] + length)
            self._borders.append(borders)

    @classmethod
    def open(
        cls, folder: Path, *, model: PreTrainedModel | None = None, documents: Sequence[Document] | None = None
    ) -> "Captured":
        """The states in a folder.

        Args:
            model: The target that they must be of; None does not check it.
            documents: The corpus that they must be along; None does not check it.

        Raises:
            InputError: There are no states, or they are of another target, another corpus or a part of it.
        """
        manifest = Manifest.read(folder)
        wanted = replace(
            manifest,
            target=manifest.target if model is None else target_of(model),
            corpus=manifest.corpus if documents is None else fingerprint_of(documents),
        )
        manifest.check(wanted, folder)
        if documents is not None and manifest.num_documents < len(documents):
            raise InputError(
                f"the shards in {folder} have {manifest.num_documents} of {len(documents)} documents; run the capture "
                "again to complete them"
            )
        shards = [FileShard(path=folder / entry.file) for entry in manifest.entries]
        if missing := [shard.path for shard in shards if not shard.path.is_file()]:
            raise InputError(f"the shard {missing[0]} is missing; run the capture again to complete them")
        return cls(manifest, shards)

    def __len__(self) -> int:
        return self._firsts[-1]

    def states(self, number: int, first: int = 0, last: int | None = None) -> CapturedStates:
        """The states of tokens `first` to before `last` of a document."""
        if not 0 <= number < len(self):
            raise IndexError(number)
        place = bisect_right(self._firsts, number) - 1
        begin, end = self._borders[place][number - self._firsts[place] :][:2]
        rows = (begin + first, end if last is None else min(begin + last, end))
        shard, contents = self._shards[place], self.manifest.contents
        hidden = {tap: shard.rows(f"hidden.{tap}", *rows) for tap in contents.taps}
        top = None
        if isinstance(contents.logits, int):
            top = TopRows(
                tokens=shard.rows("top.tokens", *rows).long(),
                log_probs=shard.rows("top.log_probs", *rows),
                log_rest=shard.rows("top.log_rest", *rows),
            )
        logits = shard.rows("logits", *rows) if contents.logits == "all" else None
        if self._embedding_and_head is not None:
            logits = self._logits(self._embedding_and_head, hidden[self.manifest.num_layers])
        return CapturedStates(hidden=hidden, rows=top, logits=logits)

    def only(self, taps: Collection[int]) -> "Captured":
        """The same states with some of the taps, so that no others are read.

        Raises:
            InputError: One of them was not captured.
        """
        kept = self.manifest.contents
        if missing := sorted(set(taps) - set(kept.taps)):
            raise InputError(f"tap {missing[0]} was not captured; the captured taps are {_taps(self.manifest)}")
        contents = replace(kept, taps=tuple(tap for tap in kept.taps if tap in taps))
        return Captured(replace(self.manifest, contents=contents), self._shards, self._embedding_and_head)

    def with_logits(self, embedding_and_head: EmbeddingAndHead) -> "Captured":
        """The same states, with all logits computed from tap `num_layers` by the target's final norm and output layer.

        Raises:
            InputError: That tap was not captured.
        """
        last = self.manifest.num_layers
        if last not in self.manifest.contents.taps:
            raise InputError(f"logits are computed from tap {last}, and the captured taps are {_taps(self.manifest)}")
        return Captured(self.manifest, self._shards, embedding_and_head)

    @torch.no_grad()
    def _logits(
        self, embedding_and_head: EmbeddingAndHead, hidden: Float[Tensor, "length hidden"]
    ) -> Float[Tensor, "length vocab"]:
        return embedding_and_head.head(embedding_and_head.norm(hidden))[..., : self.manifest.vocab_size]


def target_of(model: PreTrainedModel) -> str:
    """A hash of a target's weights; of its shapes if the weights cannot be read."""
    return weights_of(model) or f"shape {shape_of(model)}"


def save(folder: Path, file: str, tensors: Mapping[str, Tensor]) -> FileShard:
    """Write a shard. A part of a shard never has its name. Raises InputError if it cannot be written."""
    path = folder / file
    with files.written(path):
        folder.mkdir(parents=True, exist_ok=True)
        with files.replaced(path) as fresh:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, fresh)
    _opened.cache_clear()
    return FileShard(path=path)


@lru_cache(maxsize=128)
def _opened(path: Path) -> Any:
    """An open file of safetensors."""
    return safe_open(path, framework="pt")


def _taps(manifest: Manifest) -> str:
    return ", ".join(map(str, manifest.contents.taps)) or "none"


def _words(manifest: Manifest) -> str:
    """What a manifest's shards hold, for a sentence."""
    logits = manifest.contents.logits
    kind = f"the {logits} likeliest tokens" if isinstance(logits, int) else f"{logits or 'no'} logits"
    return f"taps {_taps(manifest)} and {kind} of {manifest.vocab_size} tokens in {manifest.dtype}"
