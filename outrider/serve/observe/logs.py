"""The log of a server as lines of JSON: one for each request, and one for each message. No text of a request."""

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

LOGGERS = ("outrider", "uvicorn")
"""The loggers of a server."""
FIELDS = "outrider_fields"
"""The attribute of a record that holds further fields of its line."""


class JsonLines(logging.Formatter):
    """Writes a record as one line of JSON.

    Example:
        >>> record = logging.LogRecord("outrider.serve", logging.INFO, "", 0, "the %s", ("end",), None)
        >>> {name: value for name, value in json.loads(JsonLines().format(record)).items() if name != "time"}
        {'level': 'info', 'logger': 'outrider.serve', 'message': 'the end'}
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def use_json() -> None:
    """Write the server's log to standard error as lines of JSON, one for each request among them."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
    logging.getLogger("outrider").setLevel(logging.INFO)


def note_request(log: logging.Logger, fields: Mapping[str, Any]) -> None:
    """Log an answered request, if anybody wants to know."""
    if log.isEnabledFor(logging.INFO):
        log.info("request", extra={FIELDS: dict(fields)})
