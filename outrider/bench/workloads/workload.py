"""A workload: conversations, and what was read to get them."""

import csv
import hashlib
import io
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.bench.workloads.conversation import Conversation
from outrider.bench.workloads.formats import TraceUnits, format_of
from outrider.bench.workloads.hub import KNOWN, download, hub_set, read_parquet
from outrider.bench.workloads.record import FileRecord
from outrider.core.conversations import RecordShape, taken_for
from outrider.core.inputs import InputError, parse_json, text_of
from outrider.embedded import ASSETS

BUILT_IN = "built-in"
"""The prompts that ship with the package."""
PROMPTS = ASSETS / "prompts.jsonl"
"""Their file."""
READ = "JSON lines, JSON, CSV or Parquet"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Conversations, and what was read to get them.

    Attributes:
        name: The file's name, or the data set's.
        format: Which format it is of.
        sha256: Of the file's bytes; of a folder or a data set, of all records.
    """

    name: str
    format: str
    sha256: str
    conversations: tuple[Conversation, ...]

    @property
    def has_times(self) -> bool:
        """Whether it says when each request arrives."""
        return all(each.arrives is not None for each in self.conversations)

    @property
    def taken_for(self) -> str:
        """What its records were taken for, in words."""
        prompt = RecordShape(one=f"{self.format} prompt", many=f"{self.format} prompts")
        return taken_for(Counter(each.shape or prompt for each in self.conversations))


def read_workload(place: str, units: TraceUnits | None = None) -> Workload:
    """Read a workload.

    Args:
        place: `built-in`; a file of JSON lines, JSON, CSV or Parquet; a folder of such files; one of `gsm8k`,
            `math500`, `humaneval`, `mbpp`, `mtbench`; or the id of a data set on the Hub, as
            `org/name:config:split`.
        units: What the numbers of a trace count.

    Raises:
        InputError: It cannot be read. The message names the file, the line and the field.

    Example:
        >>> read_workload("built-in").format, len(read_workload("built-in").conversations)
        ('Outrider', 40)
    """
    path = PROMPTS if place == BUILT_IN else Path(place)
    if path.is_dir():
        files = sorted(each for each in path.iterdir() if each.suffix in (".jsonl", ".json", ".parquet", ".csv"))
        if not files:
            raise InputError(f"the folder {path} holds no workload; give a file or a folder of {READ}")
        every = [record for file in files for record in _numbered(file)]
        records = [replace(record, number=i) for i, record in enumerate(every)]
        sha256 = _hash_of(records)
    elif path.is_file():
        records, sha256 = _numbered(path), hashlib.sha256(path.read_bytes()).hexdigest()
    elif place in KNOWN or ("/" in place and not path.suffix and not path.is_absolute()):
        wanted = hub_set(place)
        records = [
            FileRecord(place=f"{wanted.id}, row {i + 1}", number=i, fields=fields)
            for i, fields in enumerate(download(wanted))
        ]
        sha256 = _hash_of(records)
    else:
        raise InputError(
            f"there is no workload {place}; give a file or a folder of {READ}, one of {', '.join(KNOWN)}, or the id "
            "of a data set on the Hub"
        )
    name = place if place == BUILT_IN or not path.exists() else path.name
    return of_records(name, records, sha256, units or TraceUnits())


def of_records(name: str, records: Sequence[FileRecord], sha256: str, units: TraceUnits) -> Workload:
    """The workload of records, all of the format of the first.

    Raises:
        InputError: There is no record, one is of another format, or two have one id.
    """
    if not records:
        raise InputError(f"the workload {name} is empty")
    format = format_of(records[0])
    conversations: dict[str, Conversation] = {}
    for record in records:
        each = format.read(record, units)
        if each.id in conversations:
            raise InputError(f"{record.place}: there is a conversation {each.id!r} already; ids must differ")
        conversations[each.id] = each
    return Workload(name=name, format=format.name, sha256=sha256, conversations=tuple(conversations.values()))


def _numbered(file: Path) -> list[FileRecord]:
    """The records of a file, each with its place."""
    if file.suffix == ".parquet":
        rows = list(read_parquet(file))
        return [FileRecord(place=f"{file}, row {i + 1}", number=i, fields=row) for i, row in enumerate(rows)]
    text = text_of(file, "workload", READ)
    if file.suffix == ".csv":
        rows = [dict(row) for row in csv.DictReader(io.StringIO(text))]
        return [FileRecord(place=f"{file}, line {i + 2}", number=i, fields=row) for i, row in enumerate(rows)]
    if text.lstrip().startswith("["):
        items = parse_json(text, str(file))
        return [_record(f"{file}, item {i + 1}", i, each) for i, each in enumerate(items)]
    # Not by splitlines, which also parts lines at characters that may stand in JSON strings.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    return [
        _record(place, i, parse_json(line, place))
        for i, (place, line) in enumerate((f"{file}, line {number}", line) for number, line in lines)
    ]


def _record(place: str, number: int, fields: object) -> FileRecord:
    if not isinstance(fields, dict):
        raise InputError(f"{place} is no JSON object")
    return FileRecord(place=place, number=number, fields=fields)


def _hash_of(records: Sequence[FileRecord]) -> str:
    text = json.dumps([dict(record.fields) for record in records], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
