"""Known vulnerabilities of the pinned versions, by pip-audit.

`python -m recipes audit` makes an environment for pip-audit and asks PyPI's advisories about every line of
`constraints.txt`. If the advisories cannot be reached, the recipe says so and the exit status is 0. It is 1 if a pinned
version has a known vulnerability.
"""

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.bench.engines.environments import CannotMake, Environment, reason
from outrider.bench.side_by_side.peers import usual_folder
from outrider.core import files
from recipes import options
from recipes.clients import install

PINS = Path(__file__).parents[1] / "constraints.txt"
AUDITOR = Environment(name="pip-audit", pins=("pip-audit==2.10.1",), make=install)
QUICK: dict[str, object] = {}


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What the advisories say.

    Attributes:
        asked: Number of packages about which they say something.
        unknown: Packages about which they say nothing.
        found: Each known vulnerability, in a line.
    """

    asked: int
    unknown: tuple[str, ...]
    found: tuple[str, ...]

    @classmethod
    def read(cls, report: Mapping[str, Any]) -> "Audit":
        """The report of pip-audit.

        Example:
            >>> old = {"name": "a", "version": "1", "vulns": [{"id": "X-1", "fix_versions": ["2"]}]}
            >>> Audit.read({"dependencies": [old, {"name": "b", "skip_reason": "not found"}]})
            Audit(asked=1, unknown=('b',), found=('a 1: X-1, mended in 2',))
        """
        rows = report["dependencies"]
        known = [row for row in rows if "skip_reason" not in row]
        unknown = tuple(row["name"] for row in rows if "skip_reason" in row)
        found = []
        for row in known:
            for each in row["vulns"]:
                mended = " or ".join(each["fix_versions"]) or "no version"
                found.append(f"{row['name']} {row['version']}: {each['id']}, mended in {mended}")
        return cls(asked=len(known), unknown=unknown, found=tuple(found))

    def lines(self) -> Sequence[str]:
        """What is said about it."""
        if not self.asked:
            return ["The advisories cannot be reached from here, so no version was checked."]
        unknown = f"; {len(self.unknown)} unknown: {', '.join(self.unknown)}" if self.unknown else ""
        return [*self.found, f"{len(self.found)} known vulnerabilities in {self.asked} packages{unknown}"]


def main(
    environments: Annotated[
        Path, typer.Option(help="Folder of pip-audit's environment.", show_default=False)
    ] = usual_folder(),  # noqa: B008
    out: options.Out = None,
) -> None:
    """Check the pinned versions."""
    try:
        python = AUDITOR.ready(environments).python
    except CannotMake as error:
        print(f"pip-audit cannot be installed here, so no version was checked: {error}")
        return
    words = ("-m", "pip_audit", "--requirement", PINS, "--no-deps", "--disable-pip", "--format", "json")
    done = subprocess.run([python, *words, "--progress-spinner", "off"], capture_output=True, text=True)
    try:
        audit = Audit.read(json.loads(done.stdout))
    except ValueError:
        print(f"The advisories cannot be reached from here, so no version was checked: {reason(done.stderr)}")
        return
    print("\n".join(audit.lines()))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        files.replace(out / "audit.txt", "".join(f"{line}\n" for line in audit.lines()).encode())
    if audit.found:
        raise typer.Exit(1)
