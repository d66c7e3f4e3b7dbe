"""Expressions evaluated in a process of its own, where no types are checked at run time, as in a user's script."""

import json

import numpy as np

import outrider
from tests.world.forked import printed


def outcomes(expressions: list[str]) -> dict[str, str]:
    """What each expression gives: the repr of its value, or the class and the message of what it raises."""
    status, out, err = printed(_evaluate, expressions)
    assert status == 0, err[-3000:]
    return dict(zip(expressions, json.loads(out.splitlines()[-1]), strict=True))


def _outcome(expression: str, names: dict[str, object]) -> str:
    try:
        return repr(eval(expression, names))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _evaluate(expressions: list[str]) -> None:
    names: dict[str, object] = {"np": np, "outrider": outrider, "engine": outrider.load()}
    print(json.dumps([_outcome(expression, names) for expression in expressions]))
