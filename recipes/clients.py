"""Programs that others wrote, unchanged, against a server of ours: each is installed, used, and its results checked.

`python -m recipes clients --environments DIR` starts `outrider serve` with the embedded pair at a free port of this
machine. Each client has its own environment, which the recipe makes when it is missing. What a client does lies in
`recipes/client_programs`. The recipe names a client that cannot be installed, with pip's reason.

The exit status is 1 if a client that is installed fails.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from outrider.bench.engines import vllm
from outrider.bench.engines.environments import TORCH, CannotMake, Environment, EnvironmentFolder, reason
from outrider.bench.evidence import Row
from outrider.bench.folder import folder
from outrider.bench.report import Findings, Table
from outrider.bench.side_by_side.peers import usual_folder
from outrider.core.inputs import unknown
from outrider.embedded import EMBEDDED_TARGET
from recipes import options
from recipes.client_programs.steps import ADMIN_KEY
from recipes.fresh import ROOT
from recipes.served import served

QUICK = {"only": "curl"}
PROGRAMS = Path(__file__).parent / "client_programs"
SERVER = (
    *("--dtype", "float32", "--served-model-name", "pair"),
    *("--length", "fixed:3", "--no-probe", "--admin-key", ADMIN_KEY),
    *("--chat-template", str(PROGRAMS / "chat_template.jinja")),
    *("--response-template", str(PROGRAMS / "response_template.json")),
)
"""The server: the scores of lm-evaluation-harness are compared in float32, load generators read the acceptance of
drafts, and agents want a template with tools.
"""
OURS = ("transformers==5.24.0", "tokenizers==0.23.3", "accelerate==1.15.0", "datasets==5.2.0")
"""What computes scores beside ours, in the versions that Outrider is tested with."""


def install(room: EnvironmentFolder) -> None:
    """The pins, torch first and by itself if it is one of them."""
    first = [pin for pin in room.pins if pin == TORCH]
    if first:
        room.pip("install", *first)
    room.pip("install", *room.pins)


@dataclass(frozen=True, kw_only=True)
class Client:
    """A client.

    Attributes:
        title: What people call it.
        program: The module of `recipes.client_programs` that uses it.
        environment: Where it is installed; None: it is a command of this machine.
        reads_weights: Whether its program wants the folder of the target.
    """

    title: str
    program: str
    environment: Environment | None
    reads_weights: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a client.

    Attributes:
        client: Its title.
        version: The name of its package and the version; empty if it could not be installed.
        did: What was tried, in order.
        error: Why it failed or could not be installed; empty if everything worked.
        installed: Whether it is there.
    """

    client: str
    version: str
    did: tuple[str, ...]
    error: str
    installed: bool


def client(
    title: str,
    program: str,
    *pins: str,
    reads_weights: bool = False,
    make: Callable[[EnvironmentFolder], None] = install,
) -> Client:
    """A client with an environment of its own."""
    environment = Environment(name=program, pins=pins, make=make)
    return Client(title=title, program=program, environment=environment, reads_weights=reads_weights)


CLIENTS = {
    "curl": Client(title="curl", program="curl", environment=None),
    "commands": client("openai and anthropic", "commands", "openai==1.109.1", "anthropic==2.12.0"),
    "litellm": client("LiteLLM", "litellm", "litellm==1.110.2"),
    "instructor": client("instructor", "instructor", "instructor==1.17.0"),
    "langchain": client("langchain-openai", "langchain_openai", "langchain-openai==1.7.4"),
    "pydantic-ai": client("pydantic-ai", "pydantic_ai", "pydantic-ai-slim[openai]==2.68.0"),
    "openai-agents": client("openai-agents", "openai_agents", "openai-agents==0.24.0"),
    "lm-eval": client("lm-evaluation-harness", "lm_eval", TORCH, "lm-eval[api]==0.4.13", *OURS, reads_weights=True),
    "guidellm": client("GuideLLM", "guidellm", TORCH, "guidellm==0.8.1", reads_weights=True),
    "aiperf": client("AIPerf", "aiperf", "aiperf==0.13.0", reads_weights=True),
    "vllm": Client(
        title="vllm bench serve", program="vllm_bench", environment=vllm.ENGINE.environment, reads_weights=True
    ),
    "schemathesis": client("schemathesis", "schemathesis", "schemathesis==4.32.5", reads_weights=True),
}
"""The clients by their names on the command line."""


def tried(client: Client, url: str, environments: Path, arguments: tuple[str, ...] = ()) -> Outcome:
    """Install a client if it is missing, and run its program against a server."""
    try:
        python = _python(client, environments)
    except CannotMake as error:
        return Outcome(client=client.title, version="", did=(), error=str(error), installed=False)
    target = (str(EMBEDDED_TARGET),) if client.reads_weights else ()
    command = [str(python), "-m", "recipes.client_programs", client.program, url, *target, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=_variables(), capture_output=True, text=True, errors="replace")
    version, did = "", list[str]()
    for line in done.stdout.splitlines():
        if line.startswith('{"package"'):
            said = json.loads(line)
            version = f"{said['package']} {said['version']}"
        elif line.startswith('{"did"'):
            did.append(json.loads(line)["did"])
    failure = reason(done.stderr) if done.returncode else ""
    if done.returncode:
        print(done.stderr[-4000:], file=sys.stderr)
    return Outcome(client=client.title, version=version, did=tuple(did), error=failure, installed=True)


def _python(client: Client, environments: Path) -> Path:
    """The Python that runs a client's program. Raises CannotMake."""
    if client.environment is None:
        if shutil.which(client.program) is None:
            raise CannotMake(f"there is no command {client.program} on this machine")
        return Path(sys.executable)
    return client.environment.ready(environments).python


def _variables() -> dict[str, str]:
    """The variables of a client's process: no proxies, no keys, nothing of this Python's."""
    left_out = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY")
    own = {name: value for name, value in os.environ.items() if name not in left_out}
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    return own | quiet | {"NO_PROXY": "127.0.0.1", "PYTHONWARNINGS": "ignore"}


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
    names = options.words(only)
    for name in names:
        if name not in CLIENTS:
            raise unknown("client", name, CLIENTS)
    with folder(out, "clients", {"only": names, "server": list(SERVER)}) as place, served(SERVER) as server:
        for name in names:
            arguments = (str(examples),) if name == "schemathesis" else ()
            outcome = tried(CLIENTS[name], server.url, environments, arguments)
            print(line(outcome), flush=True)
            if outcome.installed and outcome.error:
                print("".join(server.told.copy()), file=sys.stderr)
            place.add({"phase": "clients", "turn": name, **asdict(outcome)})
        lines = [cells(row) for row in place.rows]
        head = ("client", "version", "tried", "outcome")
        place.finish(Findings(tables=[Table(title="Clients", head=head, lines=lines)]))
    if any(row["installed"] and row["error"] for row in place.rows):
        raise typer.Exit(1)
