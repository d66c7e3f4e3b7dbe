"""What every measurement carries with it: recipe, arguments, commit, versions, machine, date."""

import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import outrider
from outrider.host.remembered import cpu_name

ROOT = Path(outrider.__file__).parent.parent


def circumstances(arguments: Mapping[str, object]) -> dict[str, Any]:
    """The circumstances of a figure, as a dictionary for JSON."""
    return {
        "arguments": {name: shown(value) for name, value in arguments.items()},
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain")),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "outrider": outrider.__version__,
        },
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": list(os.getloadavg()),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def sentence(recipe: str, circumstances: Mapping[str, Any]) -> str:
    """The circumstances in a line for people.

    Args:
        recipe: A recipe's name, or a command of `outrider`.
    """
    command = recipe if recipe.startswith("outrider ") else f"python -m recipes {recipe}"
    versions = ", ".join(f"{name} {circumstances['versions'][name]}" for name in ("torch", "transformers", "outrider"))
    changed = ", with uncommitted changes" if circumstances["uncommitted_changes"] else ""
    return (
        f"`{command}`: {circumstances['cpu']}, {circumstances['threads']} threads; {versions} "
        f"({circumstances['commit']}{changed}); {circumstances['date']}."
    )


def shown(value: object) -> object:
    """An argument as JSON has it: a path within the project from the project's root, another as its name alone."""
    if isinstance(value, Path):
        whole = value.absolute()
        return str(whole.relative_to(ROOT)) if whole.is_relative_to(ROOT) else value.name
    return list(value) if isinstance(value, tuple) else value


def _git(*arguments: str) -> str | None:
    """The output of git in the project's folder; None if the package is not in a repository."""
    known = ["git", "ls-files", "--error-unmatch", outrider.__file__]
    try:
        subprocess.run(known, cwd=ROOT, capture_output=True, check=True)
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
