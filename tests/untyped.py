"""Expressions evaluated in a process of its own, where no types are checked at run time, as in a user's script."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def outcomes(expressions: list[str]) -> dict[str, str]:
    """What each expression gives: the repr of its value, or the class and the message of what it raises."""
    command = [sys.executable, "-m", "tests.untyped"]
    done = subprocess.run(command, cwd=ROOT, input=json.dumps(expressions), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(expressions, json.loads(done.stdout.splitlines()[-1]), strict=True))


def _outcome(expression: str, names: dict[str, object]) -> str:
    try:
        return repr(eval(expression, names))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    """Evaluate the expressions of standard input."""
    import numpy as np

    import outrider

    names: dict[str, object] = {"np": np, "outrider": outrider, "engine": outrider.load()}
    print(json.dumps([_outcome(expression, names) for expression in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()
