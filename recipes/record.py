"""What every measurement carries with it: arguments, commit, versions, machine, date; and files that are never half."""

import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

import outrider


def circumstances(arguments: Mapping[str, object]) -> dict[str, object]:
    """Under what a figure came about."""
    return {
        "arguments": {name: _place(value) if isinstance(value, Path) else value for name, value in arguments.items()},
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


def cpu_name() -> str:
    """The processor's name as Linux gives it, elsewhere what Python knows."""
    table = Path("/proc/cpuinfo")
    lines = table.read_text().splitlines() if table.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def write(place: Path, text: str) -> None:
    """Write a file under a temporary name, then rename it."""
    fresh = place.with_name(f"{place.name}.new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(place)


def _place(path: Path) -> str:
    """A path within the project from the project's root, another as its name alone."""
    root, whole = Path(__file__).parent.parent, path.absolute()
    return str(whole.relative_to(root)) if whole.is_relative_to(root) else path.name


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
