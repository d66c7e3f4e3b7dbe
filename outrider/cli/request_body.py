"""The options of a request as fields of a body for a server."""

from typing import Any

from outrider.cli.request import RequestOptions
from outrider.core.inputs import parse_json

NAMES = {"max_new_tokens": "max_tokens"}
"""Options with another name on the wire."""
FORMS = {"json_schema": "json", "regex": "regex", "grammar": "grammar"}
"""Options that give a grammar, by their names on the wire."""


def body_of(request: RequestOptions) -> dict[str, Any]:
    """The fields for the options that were given.

    Example:
        >>> body_of(RequestOptions(max_new_tokens=4, temperature=0.0, stop=("x",)))
        {'max_tokens': 4, 'temperature': 0.0, 'stop': ['x']}
    """
    given = request.given()
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name == "logit_bias":
            found[name] = parse_json(value, "logit_bias")
        elif name == "tools":
            found[name] = request.tool_schemas()
        elif name not in FORMS:
            found[NAMES.get(name, name)] = list(value) if isinstance(value, tuple) else value
    if (form := request.form()) is not None:
        found["structured_outputs"] = {FORMS[form[0]]: form[1]}
    return found
