"""What a program of this folder says, and how it calls commands. It needs nothing but Python."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

MODEL = "pair"
"""The name of the served model."""
ADMIN_KEY = "admin"
"""The key of the server's routes below `/v1/admin`."""
CHAT = [{"role": "user", "content": "Tell me a story about a dog."}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
"""A schema whose values are short, so that a small model comes to the end of it."""


def told(did: str, found: object = "") -> None:
    """Say that something was done, and what came of it."""
    print(json.dumps({"did": did, "found": str(found)[:200]}), flush=True)


def uses(package: str) -> None:
    """Say which package is tried, and its version."""
    print(json.dumps({"package": package, "version": version(package)}), flush=True)


def must(holds: object, what: str, found: object = None) -> None:
    """End the program with status 1 unless something holds."""
    if not holds:
        print(f"error: {what}; found {str(found)[:1500]}", file=sys.stderr)
        sys.exit(1)


def command(*words: str | Path, **variables: str) -> str:
    """What a command of this environment prints. Ends the program if the command fails.

    Args:
        variables: Variables of the environment.
    """
    own = Path(sys.executable).parent
    path = f"{own}{os.pathsep}{os.environ.get('PATH', '')}"
    texts = [str(word) for word in words]
    if (own / texts[0]).exists():
        texts[0] = str(own / texts[0])
    done = subprocess.run(
        texts, capture_output=True, text=True, errors="replace", env={**os.environ, "PATH": path, **variables}
    )
    if done.returncode:
        print(done.stdout[-4000:], file=sys.stderr)
        print(done.stderr[-4000:], file=sys.stderr)
        print(f"error: {Path(texts[0]).name} ends with status {done.returncode}", file=sys.stderr)
        sys.exit(1)
    return done.stdout + done.stderr


def is_person(value: Any) -> bool:
    """Whether a value fits `PERSON`.

    Example:
        >>> is_person({"name": "Tim", "age": 4}), is_person({"name": "Tim"})
        (True, False)
    """
    fits = isinstance(value, dict) and set(value) == {"name", "age"}
    return fits and isinstance(value["name"], str) and isinstance(value["age"], int)
