"""The most frequent tokens of a language, from a file: the only ones that a drafter then proposes (FR-Spec)."""

import json
import pickle
from collections.abc import Sequence
from pathlib import Path

import torch

from outrider.core.inputs import whole
from outrider.core.types import InputError


def read_token_map(path: str, count: int | None = None) -> list[int]:
    """Token ids from a file, the most frequent first.

    The file is a list of ids in this order, or says how often each id stands in a corpus. It is a JSON list, a JSON
    object from ids to counts, a text with an id or an id and its count per line, or a tensor of ids that torch saved
    (`.pt`, as other engines have them). Ids that never occur are left out.

    Args:
        path: The file.
        count: How many of the ids to take; None takes all.

    Raises:
        InputError: There is no such file, it holds something else, no ids, or an id twice.

    References:
        Zhao et al. 2025, FR-Spec. https://arxiv.org/abs/2502.14856
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise InputError(f"token_map must be a file of token ids, and there is no file {path}")
    if count is not None and count < 1:
        raise InputError(f"vocabulary must be >= 1, the number of tokens to draft from, got {count}")
    try:
        pairs = _tensor(file) if file.suffix == ".pt" else _text(file)
    except (ValueError, TypeError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise InputError(
            f"token_map {path} must hold token ids, or ids and their counts, as JSON, as lines of text or as a saved "
            f"tensor (.pt): {str(error).splitlines()[0]}"
        ) from error
    ids = [id for id, times in sorted(pairs, key=lambda pair: -pair[1]) if times > 0]
    if not ids:
        raise InputError(f"token_map {path} holds no token ids; give at least one")
    if min(ids) < 0:
        raise InputError(f"token ids must be >= 0, and token_map {path} holds {min(ids)}")
    seen: set[int] = set()
    for id in ids:
        if id in seen:
            raise InputError(f"token ids must be different, and token_map {path} holds {id} twice")
        seen.add(id)
    return ids[:count]


def check_listed(path: str | None, count: int | None) -> None:
    """Raise InputError if a number of tokens is given and no file that they are of."""
    if count is not None and path is None:
        raise InputError("vocabulary says how many tokens of a file may be proposed; give the file, token_map=FILE")


def checked_ids(ids: Sequence[int], width: int, path: str) -> list[int]:
    """The ids in ascending order. Raises InputError if one of them is not below the width of the vocabulary."""
    if (largest := max(ids)) >= width:
        raise InputError(
            f"token_map {path} holds token id {largest}, and the target and the drafter have ids 0..{width - 1} in "
            "common; make the list with the target's tokenizer"
        )
    return sorted(ids)


def _tensor(file: Path) -> list[tuple[int, float]]:
    loaded = torch.load(file, weights_only=True, map_location="cpu")
    ids = loaded.tolist() if isinstance(loaded, torch.Tensor) else loaded
    return _ranked(ids)


def _text(file: Path) -> list[tuple[int, float]]:
    text = file.read_text()
    if text.lstrip().startswith(("[", "{")):
        loaded = json.loads(text)
        if isinstance(loaded, dict):
            return [(int(id), whole("a count", times)) for id, times in loaded.items()]
        return _ranked(loaded)
    lines = [line.split() for line in text.splitlines() if line.strip()]
    if all(len(line) == 2 for line in lines):
        return [(int(id), int(times)) for id, times in lines]
    if any(len(line) > 1 for line in lines):
        raise ValueError("some lines have one number and some have more")
    return _ranked([int(id) for [id] in lines])


def _ranked(ids: object) -> list[tuple[int, float]]:
    """Ids in order, each with the same count, because sorting keeps the order of equals."""
    if not isinstance(ids, list):
        raise ValueError(f"expected a list of ids, got {type(ids).__name__}")
    return [(whole("a token id", id), 1) for id in ids]
