"""Hidden states and logits of a target along a corpus, captured once for many epochs of training."""

import inspect
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from outrider.core.types import InputError
from outrider.learning.batch import PADDING, Document, on_device
from outrider.learning.top_rows import TopRows
from outrider.lm.hf.anatomy import Anatomy
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead, find_embedding_and_head
from outrider.lm.hf.open import logit_width
from outrider.lm.hf.taps import tapped
from outrider.training.data.documents import fingerprint_of
from outrider.training.data.shards import (
    MANIFEST,
    Captured,
    Contents,
    FileShard,
    Manifest,
    MemoryShard,
    Shard,
    ShardEntry,
    save,
    target_of,
)

ROWS = 512
"""Rows of logits that are computed at once."""
SHARD_BYTES = 2**30
"""Size of a shard, by default."""


@dataclass(frozen=True, kw_only=True)
class CaptureMode:
    """How a capture runs. It does not change what is captured, except in roundings.

    Attributes:
        tokens_at_once: Most tokens of a forward, padding included. A longer document is a forward of its own.
        shard_bytes: Size at which a shard ends.
    """

    tokens_at_once: int = 4096
    shard_bytes: int = SHARD_BYTES


def capture(
    model: PreTrainedModel,
    documents: Sequence[Document],
    contents: Contents,
    *,
    out: Path | None = None,
    vocab_size: int | None = None,
    way: CaptureMode | None = None,
    progress: Callable[[int], None] | None = None,
) -> Captured:
    """Run the target along a corpus and keep its states.

    A capture to a folder that was killed continues behind the last complete shard.

    Args:
        model: The target.
        documents: The corpus. No document may be longer than the target's context.
        contents: What to keep. Hidden states and all logits are kept in the model's dtype.
        out: The folder of the shards; None keeps everything in memory.
        vocab_size: Cut the logits to this width, where the model's vocabulary is padded.
        progress: Called with the number of documents that are done, at the beginning and after each shard.

    Raises:
        InputError: The target cannot be read so, a document is too long, the folder holds other states or cannot be
            written, or the disk is too small.
    """
    way, reader = way or CaptureMode(), _Reader.of(model, contents, vocab_size)
    _check_lengths(documents, reader.anatomy.longest_context)
    manifest = Manifest(
        target=target_of(model),
        corpus=fingerprint_of(documents),
        num_layers=reader.anatomy.num_layers,
        vocab_size=reader.vocab_size,
        dtype=str(model.dtype).removeprefix("torch."),
        contents=contents,
    )
    shards: list[Shard] = []
    if out is not None:
        manifest = _continued(manifest, out)
        shards += [FileShard(path=out / entry.file) for entry in manifest.entries]
        rest = sum(len(document.tokens) for document in documents[manifest.num_documents :])
        _check_space(out, rest * reader.bytes_per_token)
    if progress is not None:
        progress(manifest.num_documents)
    for part in _parts(documents, manifest.num_documents, way.shard_bytes // reader.bytes_per_token):
        tensors = reader.tensors([documents[number] for number in part], way.tokens_at_once)
        name = "" if out is None else f"shard-{len(shards):05d}.safetensors"
        shards.append(MemoryShard(tensors=tensors) if out is None else save(out, name, tensors))
        entry = ShardEntry(file=name, lengths=tuple(len(documents[number].tokens) for number in part))
        manifest = replace(manifest, entries=(*manifest.entries, entry))
        if out is not None:
            manifest.write(out)
        if progress is not None:
            progress(manifest.num_documents)
    return Captured(manifest, shards)


def _check_lengths(documents: Sequence[Document], limit: int | None) -> None:
    for number, document in enumerate(documents):
        if limit is not None and len(document.tokens) > limit:
            raise InputError(
                f"document {number} has {len(document.tokens)} tokens and the target's context {limit}; read the "
                f"corpus with max_tokens={limit}"
            )


def _continued(manifest: Manifest, out: Path) -> Manifest:
    """The manifest of a folder up to its last shard that is there, or the given one where the folder has none."""
    # What a killed run was writing.
    for half in [*out.glob(".shard-*.safetensors.*"), *out.glob(f".{MANIFEST}.*")]:
        half.unlink(missing_ok=True)
    if not (out / MANIFEST).is_file():
        return manifest
    held = Manifest.read(out)
    held.check(manifest, out)
    there = [(out / entry.file).is_file() for entry in held.entries]
    return replace(held, entries=held.entries[: there.index(False) if False in there else None])


def _check_space(out: Path, needed: int) -> None:
    """Raise InputError if the disk has less space than this many bytes."""
    place = next(folder for folder in (out, *out.resolve().parents) if folder.is_dir())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise InputError(
            f"the states need {needed / 1e9:.3g} GB and {place} has {free / 1e9:.3g} GB left; give a folder with more "
            "space, fewer taps, or top-k logits"
        )


def _parts(documents: Sequence[Document], first: int, most: int) -> Iterator[range]:
    """Numbers of documents from `first` on, in parts of at least `most` tokens."""
    size, begin = 0, first
    for number in range(first, len(documents)):
        size += len(documents[number].tokens)
        if size >= most or number + 1 == len(documents):
            yield range(begin, number + 1)
            size, begin = 0, number + 1


@dataclass(frozen=True, kw_only=True)
class _Reader:
    """Reads the states of a target.

    Attributes:
        embedding_and_head: For logits; None if none are kept.
    """

    model: PreTrainedModel
    anatomy: Anatomy
    contents: Contents
    embedding_and_head: EmbeddingAndHead | None
    vocab_size: int

    @classmethod
    def of(cls, model: PreTrainedModel, contents: Contents, vocab_size: int | None) -> "_Reader":
        """A reader. Raises InputError if the target has no such taps or logits."""
        anatomy, width = Anatomy.of(model.eval()), logit_width(model)
        if anatomy.layers is None:
            raise InputError(f"{anatomy.name} has no single list of decoder layers, so its states cannot be captured")
        if wrong := [tap for tap in contents.taps if tap > anatomy.num_layers]:
            raise InputError(f"taps must be in 0..{anatomy.num_layers} for this target, got {wrong[0]}")
        if vocab_size is not None and not 1 <= vocab_size <= width:
            raise InputError(f"vocab_size must be in 1..{width}, the width of the target's logits, got {vocab_size}")
        width = vocab_size or width
        if isinstance(contents.logits, int) and contents.logits >= width:
            raise InputError(
                f"the number of likeliest tokens must be in 1..{width - 1} for this target, got {contents.logits}"
            )
        embedding_and_head = None if contents.logits is None else find_embedding_and_head(model, anatomy)
        return cls(
            model=model, anatomy=anatomy, contents=contents, embedding_and_head=embedding_and_head, vocab_size=width
        )

    @property
    def bytes_per_token(self) -> int:
        """Bytes that are kept of a token."""
        size, logits = self.model.dtype.itemsize, self.contents.logits
        hidden = len(set(self.contents.taps)) * self.anatomy.hidden_size * size
        return hidden + (8 * logits + 4 if isinstance(logits, int) else self.vocab_size * size if logits else 0)

    @torch.no_grad()
    def tensors(self, documents: Sequence[Document], tokens_at_once: int) -> dict[str, Tensor]:
        """The packed states of documents, on the host, in the order of the documents."""
        lengths, device = [len(document.tokens) for document in documents], self.model.device
        by_document: list[dict[str, Tensor]] = [{} for _ in documents]
        for numbers in _batches(lengths, tokens_at_once):
            seen = self._forward([documents[number] for number in numbers])
            kept = [
                self._kept({tap: states[row, : lengths[number]] for tap, states in seen.items()})
                for row, number in enumerate(numbers)
            ]
            for name in kept[0]:
                # One copy of all documents of the batch, for which a GPU's next forward need not wait.
                whole = to_host(torch.cat([each[name] for each in kept]))
                parts = whole.split([lengths[number] for number in numbers])
                for number, part in zip(numbers, parts, strict=True):
                    by_document[number][name] = part
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return {name: torch.cat([each[name] for each in by_document]) for name in by_document[0]}

    def _forward(self, documents: Sequence[Document]) -> Mapping[int, Float[Tensor, "rows width hidden"]]:
        width = max(len(document.tokens) for document in documents)
        tokens: Int[Tensor, "rows width"] = torch.full((len(documents), width), PADDING)
        for row, document in enumerate(documents):
            tokens[row, : len(document.tokens)] = torch.from_numpy(document.tokens)
        taps = {*self.contents.taps, *([] if self.embedding_and_head is None else [self.anatomy.num_layers])}
        # Padding stands on the right, where no token of a causal model sees it. Logits are computed in chunks later.
        few = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(self.model.forward).parameters else {}
        with tapped(self.anatomy.layers, sorted(taps)) as seen:
            self.model(input_ids=on_device(tokens.numpy(), self.model.device), use_cache=False, **few)
        return seen

    def _kept(self, hidden: Mapping[int, Float[Tensor, "length hidden"]]) -> dict[str, Tensor]:
        """The tensors of one document, by their names in a shard, on the target's device."""
        kept = {f"hidden.{tap}": hidden[tap] for tap in dict.fromkeys(self.contents.taps)}
        if self.embedding_and_head is None:
            return kept
        chunks = [self._rows(self.embedding_and_head, chunk) for chunk in hidden[self.anatomy.num_layers].split(ROWS)]
        return kept | {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}

    def _rows(self, embedding_and_head: EmbeddingAndHead, hidden: Float[Tensor, "chunk hidden"]) -> dict[str, Tensor]:
        logits = embedding_and_head.head(embedding_and_head.norm(hidden))[..., : self.vocab_size]
        if not isinstance(self.contents.logits, int):
            return {"logits": logits.to(self.model.dtype)}
        top = TopRows.of(logits, self.contents.logits)
        return {"top.tokens": top.tokens.int(), "top.log_probs": top.log_probs, "top.log_rest": top.log_rest}


def to_host(tensor: Tensor) -> Tensor:
    """A tensor in the host's memory. A copy from a GPU may arrive later, so wait for the GPU before you read it."""
    if tensor.device.type != "cuda":
        return tensor.cpu()
    there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return there.copy_(tensor, non_blocking=True)


def _batches(lengths: Sequence[int], tokens_at_once: int) -> Iterator[list[int]]:
    """Numbers of documents of similar length, with at most so many tokens together when they are padded."""
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda each: lengths[each]):
        if batch and (len(batch) + 1) * lengths[number] > tokens_at_once:
            yield batch
            batch = []
        batch.append(number)
    yield batch
