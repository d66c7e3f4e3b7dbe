"""Names of requests and of tool calls."""

import re
import uuid

NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""What a client may call its request."""


def request_id(name: str | None) -> str:
    """The client's name of a request, or a new one.

    Example:
        >>> request_id("load-7"), len(request_id("no\\nname"))
        ('load-7', 32)
    """
    return name if name is not None and NAME.fullmatch(name) else uuid.uuid4().hex


def call_id() -> str:
    """A new name for a tool call."""
    return f"call_{uuid.uuid4().hex[:24]}"
