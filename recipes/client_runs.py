"""The clients of servers: how each comes to its environment, and what its program says."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from outrider.bench.engines import vllm
from outrider.bench.engines.environments import TORCH, CannotMake, Environment, EnvironmentFolder, reason
from outrider.embedded import EMBEDDED_TARGET

ROOT = Path(__file__).parents[1]
"""Where programs are started, so that each finds `recipes.client_programs`."""
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
    command = [str(python), "-m", f"recipes.client_programs.{client.program}", url, *target, *arguments]
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
    return client.environment.made(environments).python


def _variables() -> dict[str, str]:
    """The variables of a client's process: no proxies, no keys, nothing of this Python's."""
    left_out = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY")
    own = {name: value for name, value in os.environ.items() if name not in left_out}
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    return own | quiet | {"NO_PROXY": "127.0.0.1", "PYTHONWARNINGS": "ignore"}
