"""Where a corpus comes from: files, folders, saved datasets, the Hub. Each gives records, read one after the other."""

import gzip
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from outrider.core.inputs import needs, parse_json
from outrider.core.place import check_place
from outrider.core.types import InputError
from outrider.lm.hf.open import reason_of

LINES = (".jsonl", ".ndjson")
"""Suffixes of JSON lines."""
TABLES = {".json": "json", ".parquet": "parquet"}
"""Suffixes of files that `datasets` reads, with its name for each."""
TEXTS = (".txt", ".text", ".md", ".py", ".rst")
"""Suffixes of texts in a folder. A file that is named alone may have any other suffix."""
PACKED = ".gz"
PIECE = 100_000
"""Characters of a text file after which a new document begins, at a line end."""
SAVED = ("dataset_info.json", "dataset_dict.json")
"""Files that `Dataset.save_to_disk` and `DatasetDict.save_to_disk` write."""


@dataclass(frozen=True, kw_only=True)
class SourceRecord:
    """One entry of a source.

    Attributes:
        place: Its name in messages.
        fields: Its fields.
        ends: Whether a text ends here. Only a piece of a long text file does not.
    """

    place: str
    fields: Mapping[str, Any]
    ends: bool = True


@dataclass(frozen=True, kw_only=True)
class DatasetPart:
    """The part of a dataset to read. Files and folders of text have one part.

    Attributes:
        split: Name of the split.
        config: Name of the configuration, also called subset; None takes the only one.
        revision: Branch, tag or commit on the Hub.
        columns: What the source calls a field, by the name that the field has here, such as `{"prompt": "question"}`.
    """

    split: str = "train"
    config: str | None = None
    revision: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)


def records(source: str | Path, part: DatasetPart | None = None) -> Iterator[SourceRecord]:
    """The records of a source, one after the other.

    Args:
        source: A file, a folder of files, a folder that `datasets` has saved, or the name of a dataset on the Hub.

    Raises:
        InputError: The source does not exist, or cannot be read.
    """
    part = part or DatasetPart()
    for record in _of_source(source, part):
        renamed = {name: record.fields[theirs] for name, theirs in part.columns.items() if theirs in record.fields}
        yield replace(record, fields={**record.fields, **renamed})


def _of_source(source: str | Path, part: DatasetPart) -> Iterator[SourceRecord]:
    path = Path(source).expanduser()
    if path.is_file():
        yield from _of_file(path)
    elif path.is_dir() and any((path / name).is_file() for name in SAVED):
        yield from _of_dataset(path, part)
    elif path.is_dir():
        for file in _files(path):
            yield from _of_file(file)
    elif _is_hub_name(str(source)):
        yield from _of_hub(str(source), part)
    else:
        raise InputError(f"there is no file or folder {source}; give text, JSON lines, a folder or a dataset's name")


def _files(folder: Path) -> list[Path]:
    """Files of text in a folder and its subfolders, in the order of their names."""
    known = (*LINES, *TABLES, *TEXTS)
    paths = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and _suffix(path) in known and not any(p.startswith(".") for p in path.parts[-2:])
    ]
    if not paths:
        raise InputError(f"there is no text in the folder {folder}; files must end in {', '.join(known)}, or in .gz")
    return paths


def _suffix(path: Path) -> str:
    """The suffix that tells what is in a file, in lower case."""
    return Path(path.name.removesuffix(PACKED)).suffix.lower()


def _of_file(path: Path) -> Iterator[SourceRecord]:
    suffix = _suffix(path)
    if suffix in LINES:
        yield from _lines(path)
    elif suffix in TABLES:
        yield from _of_table(path, TABLES[suffix])
    else:
        yield from _pieces(path)


@contextmanager
def _opened(path: Path) -> Iterator[BufferedIOBase]:
    """A file, unpacked where it is packed. What goes wrong while it is read becomes one sentence."""
    try:
        with gzip.open(path) if path.name.endswith(PACKED) else path.open("rb") as file:
            yield file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path} is not a complete gzip file: {error}") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


def _lines(path: Path) -> Iterator[SourceRecord]:
    """The objects of JSON lines."""
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            place = f"line {number} of {path}"
            text = _decoded(line, place).strip()
            if not text:
                continue
            fields = parse_json(text, place)
            if not isinstance(fields, dict):
                raise InputError(f"{place} is not a JSON object, but {type(fields).__name__}")
            yield SourceRecord(place=place, fields=fields)


def _pieces(path: Path) -> Iterator[SourceRecord]:
    """A text file, in pieces of whole lines."""
    with _opened(path) as file:
        kept: list[str] = []
        size, first = 0, 1
        for number, line in enumerate(file, 1):
            if size >= PIECE:
                yield SourceRecord(place=f"{path} from line {first}", fields={"text": "".join(kept)}, ends=False)
                kept, size, first = [], 0, number
            kept.append(_decoded(line, f"line {number} of {path}"))
            size += len(kept[-1])
        if kept:
            yield SourceRecord(place=f"{path} from line {first}", fields={"text": "".join(kept)})


def _decoded(line: bytes, place: str) -> str:
    try:
        return line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{place} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _of_table(path: Path, kind: str) -> Iterator[SourceRecord]:
    """The rows of a file that `datasets` reads."""
    datasets = _library(str(path))
    try:
        rows = datasets.load_dataset(kind, data_files=str(path), split="train", streaming=True)
    except Exception as error:
        raise InputError(f"{path} cannot be read: {reason_of(error)}") from error
    yield from _rows(rows, str(path))


def _of_dataset(folder: Path, part: DatasetPart) -> Iterator[SourceRecord]:
    """The rows of a saved dataset."""
    datasets = _library(str(folder))
    try:
        dataset = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise InputError(f"{folder} is not a complete saved dataset: {reason_of(error)}") from error
    if isinstance(dataset, datasets.DatasetDict):
        if part.split not in dataset:
            raise InputError(f"{folder} has no split {part.split!r}; it has {', '.join(dataset)}")
        dataset = dataset[part.split]
    yield from _rows(dataset, str(folder))


def _of_hub(name: str, part: DatasetPart) -> Iterator[SourceRecord]:
    """The rows of a dataset on the Hub, as they arrive."""
    check_place(name, "dataset", part.revision)
    datasets = _library(f"the dataset {name}")
    try:
        rows = datasets.load_dataset(name, part.config, split=part.split, revision=part.revision, streaming=True)
    except Exception as error:
        raise InputError(
            f"there is no file or folder {name}, and it cannot be loaded from the Hub: {reason_of(error)}"
        ) from error
    yield from _rows(rows, name)


def _library(what: str) -> Any:
    """The library `datasets`. Raises InputError if it is not installed."""
    try:
        import datasets
    except ImportError as error:
        raise needs(what, "datasets", "train") from error
    return datasets


def _rows(rows: Any, name: str) -> Iterator[SourceRecord]:
    number = 0
    try:
        for number, row in enumerate(rows, 1):
            yield SourceRecord(place=f"row {number} of {name}", fields=row)
    except Exception as error:
        raise InputError(f"{name} cannot be read after row {number}: {reason_of(error)}") from error


def _is_hub_name(name: str) -> bool:
    """Whether a text may be a name on the Hub, such as `org/name`.

    Example:
        >>> _is_hub_name("openai/gsm8k"), _is_hub_name("runs/data.jsonl"), _is_hub_name("./here"), _is_hub_name("a/b/c")
        (True, False, False, False)
    """
    local = name.startswith((".", "/", "~")) or name.count("/") > 1 or not name.strip("/")
    return not local and _suffix(Path(name)) not in (*LINES, *TABLES, *TEXTS)
