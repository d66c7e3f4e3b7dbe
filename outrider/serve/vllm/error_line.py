"""What of vLLM's log tells why it failed: its last real error line, without addresses."""

import re

ERROR = re.compile(r"(?:^|[\s.])(?P<kind>\w*(?:Error|Exception)|error): (?P<message>\S.*)$")
"""A line that tells an error: `ValueError: ...`, or `vllm serve: error: ...`."""
DETAIL = re.compile(r"^\s*(?:Value error|Assertion failed), (?P<message>.*?)(?: \[type=.*)?$")
"""The line in which pydantic tells what a check said."""
PREFIX = re.compile(r"^\([^)]*pid=\d+\)\s*(?:(?:ERROR|WARNING|INFO)\s+\S+ \S+ \[[^\]]*\]\s?)?")
"""What vLLM writes before each line: the process, and often the time and the place in its code."""
ADDRESS = re.compile(r"\S*\w+://\S+")
GENERIC = ("Engine core initialization failed", "Engine process failed to start", "WorkerProc initialization failed")
"""Errors that only say that there was one before."""
LONGEST = 300


def error_line(log: str) -> str | None:
    """The last line of a log that tells an error by itself; None if there is none.

    Example:
        >>> print(error_line('''(EngineCore pid=7) ValueError: the head has no fc.weight
        ... (APIServer pid=5) RuntimeError: Engine core initialization failed. See root cause above.'''))
        the head has no fc.weight
        >>> print(error_line('''pydantic_core.ValidationError: 1 validation error for SpeculativeConfig
        ...   Value error, Model Runner V1 does not support: dspark [type=value_error, input_value=7]
        ...     For further information visit https://errors.pydantic.dev/2/v/value_error'''))
        Model Runner V1 does not support: dspark
    """
    message: str | None = None
    for raw in log.splitlines():
        line = PREFIX.sub("", raw)
        match = DETAIL.match(line) or ERROR.search(line)
        if match is not None and not match["message"].startswith(GENERIC):
            message = match["message"]
    return None if message is None else shortened(message)


def last_words(log: str) -> str:
    """Why a process ended, as its log has it: its last error, or else its last line.

    Example:
        >>> last_words("loading\\n\\nKilled\\n"), last_words("")
        ('Killed', 'it said nothing')
    """
    lines = [PREFIX.sub("", line).strip() for line in log.splitlines()]
    return error_line(log) or shortened(next((line for line in reversed(lines) if line), "it said nothing"))


def shortened(line: str) -> str:
    """A line without addresses, and not too long."""
    return " ".join(ADDRESS.sub("", line).split())[:LONGEST].rstrip(" .,:")
