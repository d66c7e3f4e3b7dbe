"""Outputs as JSON lines: the fields of a record, and a file of records that a later run can continue."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.core.inputs import InputError
from outrider.core.types import Step, Timing
from outrider.engine.output import Output

PARTS = ("target", "drafter", "rows", "verify", "commit", "replay", "rest", "overlap")
"""Parts of a step's time. `overlap` is the time during which two parts ran at once; it counts once."""
BEGINNING = b'{"index": '
"""How every record begins in a file."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """One output to make.

    Attributes:
        prompt_index: Number of its prompt, from 0.
        sample_index: Number among the outputs of that prompt, from 0.
        index: Number among all outputs.
        request: A name that differs for every other prompt or setting.
    """

    prompt_index: int
    sample_index: int
    index: int
    request: str

    def record(self, output: Output) -> dict[str, Any]:
        """The output as an object of JSON."""
        numbers = {"index": self.index, "prompt_index": self.prompt_index, "sample_index": self.sample_index}
        record = numbers | {"request": self.request} | {name: getattr(output, name) for name in FIELDS}
        for name in ("logprobs", "top_logprobs"):
            if getattr(output, name) is not None:
                record[name] = getattr(output, name)
        return record


FIELDS = (
    "id",
    "text",
    "tokens",
    "prompt_tokens",
    "finish_reason",
    "context_full",
    "num_steps",
    "num_draft_tokens",
    "num_accepted_tokens",
    "accepted_per_position",
    "block_efficiency",
    "seconds",
    "tokens_per_second",
)
"""Fields of every record."""


def profile(steps: Sequence[Step]) -> dict[str, Any]:
    """Number of iterations, and milliseconds per iteration for each part of the time."""
    timings: list[Timing] = list({id(step.timing): step.timing for step in steps}.values())
    count = max(1, len(timings))
    spent = {part: 1000 * sum(getattr(timing, part) for timing in timings) / count for part in PARTS}
    return {"iterations": len(timings), "ms_per_iteration": spent}


@dataclass(frozen=True, kw_only=True)
class OutputFile:
    """A file of JSON lines. Each record is added when its output has ended."""

    path: Path

    def held(self, wanted: Sequence[Wanted]) -> set[int]:
        """Which of the outputs that are asked for the file holds, by index. A half-written last line is cut off.

        Raises:
            InputError: The file holds other lines, or outputs of other requests.
        """
        if not self.path.is_file():
            return set()
        asked = {(each.prompt_index, each.sample_index): each for each in wanted}
        indices: set[int] = set()
        *lines, last = self.path.read_bytes().split(b"\n")
        for number, line in enumerate(lines if _is_half(last) else [*lines, last], 1):
            if line.strip():
                record = self._record(line, number)
                same = asked.get((record["prompt_index"], record["sample_index"]))
                if same is not None and same.request != record["request"]:
                    raise InputError(
                        f"line {number} of {self.path} is the output of another request; give another file, or the "
                        "prompts and settings that it was written with"
                    )
                indices |= {same.index} if same is not None else set()
        self._repair(last)
        return indices

    def check(self) -> None:
        """Raise InputError where the file cannot be written, before there is an output to write."""
        fresh = not self.path.exists()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab"):
                pass
            if fresh:
                self.path.unlink()
        except OSError as error:
            raise InputError(f"the output file {self.path} cannot be written: {error.strerror}") from error

    def add(self, record: Mapping[str, Any]) -> None:
        """Append a record."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def _record(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            match json.loads(line):
                case {"prompt_index": int(), "sample_index": int(), "request": str()} as record:
                    return record
        except (ValueError, RecursionError):
            pass
        raise InputError(f"line {number} of {self.path} is no output of `outrider generate`; give another file")

    def _repair(self, last: bytes) -> None:
        """End the last line, or cut it off where it is half an object."""
        if _is_half(last):
            with self.path.open("r+b") as file:
                file.truncate(self.path.stat().st_size - len(last))
        elif last:
            with self.path.open("ab") as file:
                file.write(b"\n")


def _is_half(line: bytes) -> bool:
    """Whether a line is the beginning of a record, and not all of one.

    Example:
        >>> _is_half(b'{"index": 3, "promp'), _is_half(b'{"index": 3}'), _is_half(b"Once upon"), _is_half(b"")
        (True, False, False, False)
    """
    if not (line.startswith(BEGINNING) or BEGINNING.startswith(line)) or not line:
        return False
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return True
    return False
