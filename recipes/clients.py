"""Programs that others wrote, unchanged, against a server of ours: each is installed, used, and its results checked.

`python -m recipes clients --environments DIR` starts `outrider serve` with the embedded pair at a free port of this
machine. Each client has its own environment, which the recipe makes when it is missing. What a client does lies in
`recipes/client_programs`. The recipe names a client that cannot be installed, with pip's reason.

The exit status is 1 if a client that is installed fails.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from outrider.bench.evidence import Row
from outrider.bench.folder import folder
from outrider.bench.report import Findings, Table
from outrider.bench.side_by_side.peers import usual_folder
from outrider.core.inputs import InputError, unknown
from recipes import options
from recipes.client_programs.steps import ADMIN_KEY
from recipes.client_runs import CLIENTS, Client, Outcome, tried

QUICK = {"only": "curl"}
HERE = Path(__file__).parent
PROGRAMS = HERE / "client_programs"
ADDRESS = re.compile(r"^serving .* at (http://\S+) ")
SERVER = (
    *("serve", "--port", "0", "--dtype", "float32", "--served-model-name", "pair"),
    *("--length", "fixed:3", "--no-probe", "--admin-key", ADMIN_KEY),
    *("--chat-template", str(PROGRAMS / "chat_template.jinja")),
    *("--response-template", str(PROGRAMS / "response_template.json")),
)
"""The server: the scores of lm-evaluation-harness are compared in float32, load generators read the acceptance of
drafts, and agents want a template with tools.
"""


@contextmanager
def serving() -> Iterator[str]:
    """The address of a server that ends with the block. What it says goes to a file, and at the end to standard error.

    Raises:
        InputError: It does not start.
    """
    with tempfile.NamedTemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        command = [sys.executable, "-m", "outrider", *SERVER]
        process = subprocess.Popen(command, cwd=HERE.parent, env={**os.environ, "HF_HUB_OFFLINE": "1"}, stderr=said)
        try:
            yield _address(process, Path(said.name))
        finally:
            process.terminate()
            process.wait()
            print(Path(said.name).read_text(encoding="utf-8", errors="replace"), end="", file=sys.stderr)


def _address(process: "subprocess.Popen[bytes]", said: Path) -> str:
    """Where a server listens, as soon as it says so."""
    while process.poll() is None:
        if found := ADDRESS.search(said.read_text(encoding="utf-8", errors="replace")):
            return found[1]
        time.sleep(0.1)
    raise InputError("the server did not start; what it said stands above")


def run(
    places: Path,
    names: Sequence[str],
    out: Path | None = None,
    arguments: Mapping[str, tuple[str, ...]] | None = None,
    clients: Mapping[str, Client] = CLIENTS,
) -> list[Row]:
    """Try clients, and print a line for each.

    Args:
        places: Folder of their environments.
        names: Their names on the command line.
        arguments: Further arguments of programs, by client.

    Raises:
        InputError: There is no such client.
    """
    for name in names:
        if name not in clients:
            raise unknown("client", name, clients)
    made = {"only": list(names), "server": list(SERVER)}
    with folder(out, "clients", made) as place, serving() as url:
        for name in names:
            outcome = tried(clients[name], url, places, (arguments or {}).get(name, ()))
            print(line(outcome), flush=True)
            place.add({"phase": "clients", "turn": name, **asdict(outcome)})
        lines = [cells(row) for row in place.rows]
        place.finish(
            Findings(tables=[Table(title="Clients", head=("client", "version", "tried", "outcome"), lines=lines)])
        )
        return list(place.rows)


def line(outcome: Outcome) -> str:
    """What came of a client, in one line.

    Example:
        >>> line(Outcome(client="curl", version="curl 8", did=("chat", "stream"), error="", installed=True))
        'curl (curl 8): chat, stream: ok'
    """
    client, version, did, told = cells(asdict(outcome))
    return f"{client}{f' ({version})' if version else ''}: {f'{did}: ' if did else ''}{told}"


def cells(row: Row) -> list[str]:
    """The cells of a client's row."""
    told = row["error"] if row["installed"] else f"cannot be installed: {row['error']}"
    return [row["client"], row["version"], ", ".join(row["did"]), told or "ok"]


def main(
    environments: Annotated[
        Path, typer.Option(help="Folder of the clients' environments, several GB.", show_default=False)
    ] = usual_folder(),  # noqa: B008
    only: Annotated[str, typer.Option(help=f"Names with commas: {', '.join(CLIENTS)}.")] = ",".join(CLIENTS),
    examples: Annotated[int, typer.Option(min=1, help="Random requests of schemathesis for each route.")] = 40,
    out: options.Out = None,
) -> None:
    """Try foreign clients against a server."""
    names = [name.strip() for name in only.split(",") if name.strip()]
    rows = run(environments, names, out, {"schemathesis": (str(examples),)})
    if any(row["installed"] and row["error"] for row in rows):
        raise typer.Exit(1)
