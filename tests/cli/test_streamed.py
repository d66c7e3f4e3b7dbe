"""Text that is streamed stays whole where standard error is shown in the same place."""

import os
import sys
import warnings

import pytest

from outrider.cli.opened import _one_line
from outrider.cli.printed import print_line
from outrider.cli.streamed import streamed
from outrider.engine.crowd import CrowdedWarning
from tests.world.forked import printed


def spoken(one_place: bool, fails: bool = False) -> None:
    """Stream a text, and say things on standard error meanwhile."""
    warnings.formatwarning = _one_line
    if one_place:
        os.dup2(sys.stdout.fileno(), sys.stderr.fileno())
    with streamed() as text:
        print_line("before")
        text.print("Once upon a time", style="dim")
        text.print(", a")
        warnings.warn(CrowdedWarning("few cores"), stacklevel=2)
        text.print(" mouse\n")
        print("a log line", file=sys.stderr, flush=True)
        text.print("ran")
        if fails:
            raise ValueError("no more")
    print_line("after")


def test_what_is_said_meanwhile_stands_on_lines_of_its_own():
    _, out, err = printed(spoken, True)
    assert out == "before\nOnce upon a time, a\nwarning: few cores\n mouse\na log line\nran\nafter\n", err


def test_text_is_unchanged_where_standard_error_is_elsewhere():
    _, out, err = printed(spoken, False)
    assert out == "Once upon a time, a mouse\nran\n"
    assert err == "before\nwarning: few cores\na log line\nafter\n"


def test_an_error_begins_a_line_of_its_own():
    _, out, err = printed(spoken, False, True)
    assert out == "Once upon a time, a mouse\nran\n", err


def test_standard_error_is_given_back(capfd: pytest.CaptureFixture[str]):
    before = sys.stderr
    with streamed() as text:
        text.print("a")
    assert sys.stderr is before
    assert capfd.readouterr().out == "a\n"
