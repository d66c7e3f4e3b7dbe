"""The folder that a measurement writes: rows as they come, then tables, plots, claims and circumstances, never half."""

import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from outrider.bench.circumstances import circumstances, shown
from outrider.bench.evidence import Row
from outrider.bench.report import Findings
from outrider.bench.turns import Named, Turn
from outrider.core import files, progress
from outrider.core.progress import task
from outrider.core.types import InputError

AMOUNTS = (
    "out",
    "seeds",
    "rounds",
    "families",
    "as_is",
    "configurations",
    "peers",
    "loads",
    "time_limit",
    "objectives",
    "timed",
)
"""Arguments on which no row depends: which rows there are, and what they are judged with."""

W = TypeVar("W", bound=Named)
J = TypeVar("J", bound=Named)


def read_rows(place: Path) -> list[Row]:
    """The rows of a file, or of its packed form (`rows.jsonl.gz`); a last line that was cut off is left out."""
    packed = place.with_name(place.name + ".gz")
    if place.exists():
        content = place.read_bytes()
    elif packed.exists():
        content = gzip.decompress(packed.read_bytes())
    else:
        return []
    lines = content.decode().split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def read_record(place: Path) -> dict[str, Any]:
    """The circumstances of the run that a folder holds."""
    try:
        record: dict[str, Any] = json.loads((place / "circumstances.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{place} is not the folder of a run: {error}") from error
    return record


class Folder:
    """What one run of a recipe leaves behind; made by `folder`.

    Nothing is written before the first row. A run that was cut off goes on where it stopped: a turn whose row is there
    is not taken again.

    Attributes:
        place: Where it is; None keeps the rows in memory.
        rows: All rows, those of an earlier run first.
    """

    def __init__(self, place: Path | None, recipe: str, arguments: Mapping[str, object]) -> None:
        self.place, self.recipe = place, recipe
        self.rows: list[Row] = []
        self._record: dict[str, Any] = {"recipe": recipe, "circumstances": circumstances(arguments), "resumed": []}
        self._now: dict[str, Any] | None = None
        self._begun = False
        if place is not None:
            self._resume(place)

    def _resume(self, place: Path) -> None:
        """Take over the rows of an earlier run with the same arguments."""
        if place.exists() and not place.is_dir():
            raise InputError(f"cannot make the folder {place}: there is a file of this name; give another with --out")
        if not (place / "circumstances.json").exists():
            if any(place.glob("rows.jsonl*")):
                raise InputError(f"{place} has rows of an unknown run; give another folder with --out")
            return
        earlier = read_record(place)
        ours, theirs = (_settled(each["circumstances"]["arguments"]) for each in (self._record, earlier))
        if (self.recipe, ours) != (earlier["recipe"], theirs):
            changed = sorted(n for n in {*ours, *theirs} if ours.get(n) != theirs.get(n)) or ["recipe"]
            raise InputError(f"{place} has rows of a run with another {', '.join(changed)}; give another with --out")
        self._now = self._record["circumstances"]
        self.rows = read_rows(place / "rows.jsonl")
        self._record = {"resumed": [], **earlier}
        self._record["circumstances"]["arguments"] = self._now["arguments"]

    @property
    def circumstances(self) -> Mapping[str, Any]:
        """Under what the first row came about."""
        recorded: Mapping[str, Any] = self._record["circumstances"]
        return recorded

    def add(self, row: Row) -> Row:
        """Keep a row, and write it."""
        if self.place is not None:
            self._begin(self.place)
            if self._now is not None:
                self._record["resumed"].append(self._now)
                self._write_record(self.place)
                self._now = None
            with (self.place / "rows.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        self.rows.append(row)
        return row

    def _begin(self, place: Path) -> None:
        if self._begun:
            return
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot make the folder {place}: {error.strerror}; give another with --out") from error
        # Without the line that was cut off.
        files.replace(place / "rows.jsonl", "".join(json.dumps(row) + "\n" for row in self.rows).encode())
        self._write_record(place)
        self._begun = True

    def _write_record(self, place: Path) -> None:
        files.replace(place / "circumstances.json", (json.dumps(self._record, indent=2) + "\n").encode())

    def take(
        self,
        phase: str,
        turns: Iterable[Turn[W, J]],
        run: Callable[[Turn[W, J]], Row | None],
        *,
        as_is: bool = False,
    ) -> list[Row]:
        """Take turns, and return the rows of all of them; those that an earlier run has taken are not taken again.

        Args:
            phase: Named in the rows.
            run: Does a turn; what it returns is the row. None leaves no row, and the turn is taken in the next run.
            as_is: Take no turn, and return the rows that are there.
        """
        todo = list(turns)
        have = {row["turn"]: row for row in self.rows if row.get("phase") == phase}
        rows = []
        with task(phase, len(todo), "runs") as bar:
            for turn in todo:
                row = have.get(turn.name)
                if row is None and as_is:
                    continue
                if row is None:
                    head = {"phase": phase, "turn": turn.name, "order": len(self.rows), "round": turn.round}
                    measured = run(turn)
                    row = None if measured is None else self.add({**head, **measured})
                if row is not None:
                    rows.append(row)
                bar.advance()
        return rows

    def keep(self, name: str, rows: Sequence[Row]) -> None:
        """Write further rows under a name, numbers with six digits."""
        if self.place is not None:
            self._begin(self.place)
            files.replace(self.place / name, "".join(json.dumps(_rounded(row)) + "\n" for row in rows).encode())

    def finish(self, findings: Findings) -> list[dict[str, Any]]:
        """Write what was found, print it, and return the claims as `claims.json` has them."""
        claims = self.write(findings)
        Console(soft_wrap=True, highlight=False).print(findings.spoken(self.recipe, self.circumstances), markup=False)
        return claims

    def write(self, findings: Findings, *, rows_inside: bool = False) -> list[dict[str, Any]]:
        """Write what was found, and return the claims as `claims.json` has them.

        Args:
            rows_inside: Whether the rows stand within the page too.
        """
        claims = [asdict(claim) for claim in findings.claims]
        if self.place is not None:
            self._begin(self.place)
            self._record["ended"] = circumstances({})
            record = json.dumps(self._record, indent=2)
            first = json.dumps(self.rows[0], indent=2) if self.rows else "none"
            rows = "".join(json.dumps(row) + "\n" for row in self.rows) if rows_inside else ""
            page = findings.html(
                self.recipe, self.circumstances, count=len(self.rows), first=first, record=record, rows=rows
            )
            pages = {
                "table.md": findings.markdown(self.recipe, self.circumstances),
                "report.html": page,
                "claims.json": json.dumps(claims, indent=2) + "\n" if claims else "",
                "plot.svg": findings.plot(),
                "summary.json": "" if findings.summary is None else json.dumps(findings.summary, indent=2) + "\n",
                "circumstances.json": record + "\n",
            }
            for name, text in pages.items():
                if text:
                    files.replace(self.place / name, text.encode())
        return claims


def _rounded(row: Row) -> Row:
    return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in row.items()}


def _settled(arguments: Mapping[str, object]) -> dict[str, object]:
    """What must be the same for a run to go on: more or less may be asked for, in another folder."""
    return {name: value for name, value in arguments.items() if name not in AMOUNTS}


@contextmanager
def folder(place: Path | None, recipe: str, arguments: Mapping[str, object]) -> Iterator[Folder]:
    """A folder for the time of a recipe's run, which shows how far it is."""
    texts = {name: shown(value) for name, value in arguments.items()}
    with progress.shown(recipe):
        yield Folder(place, recipe, texts)
