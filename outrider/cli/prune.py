"""outrider prune: cut a draft model out of a target, plan which shape would pay, or count the tokens of a text."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from outrider.cli.opened import tell_loading
from outrider.cli.printed import print_json, print_line, table
from outrider.core import files, progress
from outrider.core.conversations import taken_for
from outrider.core.destination import check_free, locked_file
from outrider.core.inputs import InputError
from outrider.core.option import Bounds
from outrider.embedded import EMBEDDED_TARGET
from outrider.learning.batch import Document
from outrider.lm.hf.open import open_config, open_model, open_tokenizer
from outrider.surgery import experts, reshape
from outrider.surgery import plan as planning
from outrider.surgery.checkpoint import write
from outrider.surgery.family import same_size
from outrider.surgery.shape import ModelShape, num_parameters, shape_of, smaller_shape
from outrider.training.data.records import RecordReader
from outrider.training.data.sources import DatasetPart, records
from outrider.training.options import DataOptions

SHARE = 5
"""A draft model has one of so many parts of the target's parameters where no number is given."""

DEPTHS = (1, 2, 4, 8, 16, 32)
"""Depths to compare where none are given, as far as the target has them."""

LISTS = (4096, 8192, 16384, 32768)
"""Lengths of lists of tokens whose share of a text is printed."""

ENOUGH = 0.98
"""Share of a text that the list of the printed command has at least."""


@dataclass(frozen=True, kw_only=True)
class PruneOptions:
    """What is to be cut.

    Attributes:
        target: Directory or hub id; None is the embedded target.
        device: Where it runs; None chooses.
        data: The text.
        out: The folder of the result.
        num_tokens: Most tokens of text to read.
        as_json: Whether to print for programs.
    """

    target: str | None
    device: str | None
    data: DataOptions
    out: Path
    num_tokens: int
    as_json: bool

    @property
    def source(self) -> str:
        """Directory or hub id of the target."""
        return self.target or str(EMBEDDED_TARGET)


def prune_experts(job: PruneOptions, num_experts: int, method: str, experts_per_token: int | None) -> None:
    """Write a model with fewer experts, and say what was kept."""
    model, tokenizer, texts = _opened(job, lambda config: experts.check_experts(config, num_experts, experts_per_token))
    with _progress(texts) as advance:
        pruned = experts.prune_experts(
            model, texts, num_experts, method, experts_per_token=experts_per_token, progress=advance
        )
    record = {
        "method": method,
        "num_experts": num_experts,
        "experts_per_token": pruned.model.config.get_text_config(decoder=True).num_experts_per_tok,
        "num_tokens": pruned.num_tokens,
        "origins": pruned.origins,
        "usage": pruned.usage,
    }
    _write(job, model, pruned.model, tokenizer, record, f"{num_experts} experts in each layer")


def prune_shape(
    job: PruneOptions, *, layers: int | None, width: int | None, heads: int | None, feed_forward: int | None
) -> None:
    """Write a model of a smaller shape, and say what was kept."""
    if layers is width is heads is feed_forward is None:
        raise InputError("nothing is to be cut; give --layers, --width, --heads or --feed-forward")

    def smaller(config: PreTrainedConfig) -> ModelShape:
        return smaller_shape(shape_of(config), layers=layers, width=width, heads=heads, feed_forward=feed_forward)

    model, tokenizer, texts = _opened(job, lambda config: reshape.check_shape(config, smaller(config)))
    shape = smaller(model.config)
    with _progress(texts) as advance:
        pruned = reshape.prune_shape(model, texts, shape, advance)
    record = {
        "method": "shape",
        "shape": asdict(pruned.shape),
        "layers": pruned.layers,
        "influence": pruned.importance.layers.tolist(),
        "num_tokens": sum(map(len, texts)),
    }
    _write(job, model, pruned.model, tokenizer, record, str(pruned.shape))


def plan(
    target: str | None,
    *,
    parameters: int | None,
    layers: str | None,
    alpha: str,
    context: int,
    rounds: int,
    device: str | None,
    as_json: bool,
) -> None:
    """Time shapes of one size, and print what each would be worth."""
    depths = None if layers is None else _numbers("--layers", layers, int)
    alphas = _numbers("--alpha", alpha, float)
    tell_loading()
    model = open_model(target or str(EMBEDDED_TARGET), device=device)
    if depths is None:
        depths = [n for n in DEPTHS if n <= shape_of(model.config).layers]
    if len(alphas) not in (1, len(depths)):
        raise InputError(f"--alpha must be one number or {len(depths)}, one for each depth, got {len(alphas)}")
    wanted = num_parameters(model.config) // SHARE if parameters is None else parameters
    alpha_of = dict(zip(depths, alphas * len(depths) if len(alphas) == 1 else alphas, strict=True))
    family = same_size(model.config, wanted, depths)
    values = [alpha_of[sized.shape.layers] for sized in family]
    shapes = planning.plan(model, family, values, context=context, rounds=rounds)
    if as_json:
        print_json({"parameters": wanted, "context": context, "shapes": [asdict(each) for each in shapes]})
        return
    columns = ("shape", "parameters", "ms per draft token", "alpha", "best length", "tokens/s", "speedup")
    shown = table((*columns, "alpha needed"), f"shapes of about {wanted:,} parameters, the fastest first")
    for each in shapes:
        shown.add_row(
            str(each.shape),
            f"{each.num_parameters:,}",
            f"{each.draft_seconds * 1000:.2f}",
            f"{each.alpha:.2f}",
            str(each.length),
            f"{each.tokens_per_second:.0f}",
            f"{each.speedup:.2f}",
            "never" if each.needed is None else f"{each.needed:.2f}",
        )
    console = Console(highlight=False, soft_wrap=True)
    console.print(shown)
    console.print("alpha needed: the acceptance that would make the shape as fast as the first one")


def count_tokens(target: str | None, data: DataOptions, out: Path, as_json: bool) -> None:
    """Write how often each token stands in a text, and print how much of it the most frequent ones are."""
    if out.exists():
        raise InputError(f"{out} exists already; give a new file with --out, or remove it")
    source = target or str(EMBEDDED_TARGET)
    with locked_file(out):
        tell_loading()
        reader, documents = _documents(data, _tokenizer(source))
        counts = Counter[int]()
        with progress.shown(), progress.task("counting", unit="tokens") as counting:
            for document in documents:
                # The prompt of an answer is not the target's.
                answer = document.tokens[document.start :]
                tokens = (answer if len(answer) else document.tokens).tolist()
                counts.update(tokens)
                counting.advance(len(tokens))
        _tell_taken(data, reader, empty=not counts)
        with files.written(out):
            files.replace(out, json.dumps(dict(counts.most_common())).encode())
    most = np.cumsum([count for _, count in counts.most_common()])
    shares = {size: float(most[size - 1] / most[-1]) for size in (*LISTS, len(most)) if size <= len(most)}
    enough = next(size for size, share in shares.items() if share >= ENOUGH)
    if as_json:
        print_json({"out": str(out), "target": source, "tokens": int(most[-1]), "shares": shares, "vocabulary": enough})
        return
    shown = table(("vocabulary", "share of the text"), f"{most[-1]:,} tokens, {len(most):,} different ones", words=0)
    for size, share in shares.items():
        shown.add_row(f"{size:,}", f"{share:.2%}")
    console = Console(highlight=False, soft_wrap=True)
    console.print(shown)
    use = f"--drafter model:path=DRAFT,token_map={out},vocabulary={enough}"
    console.print(f"use it with {use}, where DRAFT is a draft model", markup=False)


def read_texts(data: DataOptions, tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> list[list[int]]:
    """Token ids of the documents that training would read, prompts without answers too, until there are enough tokens.
    What the data was taken for is said on standard error.

    Raises:
        InputError: The data cannot be read, or there is no text at all.
    """
    reader, documents = _documents(data, tokenizer)
    texts: list[list[int]] = []
    left = num_tokens
    for document in documents:
        if left <= 0:
            break
        if len(document.tokens) > 1:
            texts.append(document.tokens[:left].tolist())
            left -= len(texts[-1])
    _tell_taken(data, reader, empty=left == num_tokens)
    return texts


def _documents(data: DataOptions, tokenizer: PreTrainedTokenizerBase) -> tuple[RecordReader, Iterator[Document]]:
    """The documents that training would read, prompts without answers too, and their reader."""
    Bounds(least=1).check("limit", data.limit)
    part = DatasetPart(split=data.split, config=data.subset, columns=data.columns)
    reader = RecordReader(tokenizer=tokenizer, prompts=True, vocab_size=max(tokenizer.get_vocab().values()) + 1)
    documents = (doc for each in data.data for record in records(each, part) for doc in reader.documents(record))
    return reader, islice(documents, data.limit)


def _tell_taken(data: DataOptions, reader: RecordReader, *, empty: bool) -> None:
    """Say on standard error what the data was taken for. Raises InputError if there was no text."""
    place = ", ".join(data.data)
    if empty:
        raise InputError(f"{place} holds no text; give documents of the task that the draft model is for")
    print_line(f"{place}: {taken_for(reader.taken)}")


def _tokenizer(source: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a target. Raises InputError if it has none."""
    tokenizer = open_tokenizer(source)
    if tokenizer is None:
        raise InputError(f"there is no tokenizer beside {source}, so no text can be read; put one into the folder")
    return tokenizer


def _opened(
    job: PruneOptions, check: Callable[[PreTrainedConfig], None]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[list[int]]]:
    """The target, its tokenizer and the text. What is wrong with folders, sizes and text is found before the target.

    Args:
        check: Raises InputError if a model of this config cannot be cut so.
    """
    check_free(job.out)
    tell_loading()
    check(open_config(job.source))
    tokenizer = _tokenizer(job.source)
    texts = read_texts(job.data, tokenizer, job.num_tokens)
    return open_model(job.source, device=job.device), tokenizer, texts


@contextmanager
def _progress(texts: list[list[int]]) -> Iterator[Callable[[int], None]]:
    with progress.shown(), progress.task("reading the text", sum(map(len, texts)), "tokens") as reading:
        yield reading.advance


def _write(
    job: PruneOptions,
    model: PreTrainedModel,
    pruned: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    record: dict[str, Any],
    what: str,
) -> None:
    before, after = (sum(weight.numel() for weight in each.parameters()) for each in (model, pruned))
    full = {
        "target": job.source,
        "data": ", ".join(job.data.data),
        "parameters": {"before": before, "after": after},
        **record,
    }
    write(pruned, tokenizer, job.out, full)
    if job.as_json:
        print_json({"out": str(job.out), **full})
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{job.out}: {what}; {after:,} of {before:,} parameters", markup=False)


def _numbers(option: str, text: str, kind: type) -> list[Any]:
    try:
        return [kind(each) for each in text.split(",")]
    except ValueError as error:
        what = "whole numbers" if kind is int else "numbers"
        raise InputError(f"{option} must be {what} with commas between them, got {text!r}") from error
