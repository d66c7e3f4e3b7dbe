"""The form that an output must have: response formats, structured outputs and forced tool calls, as grammars."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from outrider.constraints.grammar import Grammar, any_json, choice, json_schema, regex, rules, structural_tag
from outrider.core.inputs import InputError
from outrider.serve.api.bodies import NamedTool, ResponseFormat, StructuredOutputs, Tool, deeper
from outrider.serve.errors import refuse, refuse_key
from outrider.serve.limits import Limits

WHITESPACE = 16
"""Most whitespace characters between two elements of JSON: a line break and the indentation of deep objects. Without a
bound, small models go on with it to the end."""
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of a function without parameters."""
KINDS = ("json_", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """The tools of a request, and whether the model may or must call them.

    Attributes:
        offered: Tools that the model may call.
        forced: Tools of which the output must be a call; empty where nothing is forced.
        named: Whether the request names the function. The output is then its arguments alone.
        several: Whether a forced output is a list of calls.
    """

    offered: Sequence[Tool] = ()
    forced: Sequence[Tool] = ()
    named: bool = False
    several: bool = False

    @classmethod
    def of(
        cls, tools: Sequence[Tool] | None, choice: str | NamedTool | None, *, several: bool, limits: Limits
    ) -> "ToolUse":
        """The tools of a chat request. Raises ServeError for tools or a choice that cannot be used."""
        if tools is None:
            if choice not in (None, "none"):
                refuse("tool_choice", "tool_choice can be given with tools alone")
            return cls()
        if not 0 < len(tools) <= limits.max_tools:
            refuse("tools", f"tools must hold 1 .. {limits.max_tools} tools, got {len(tools)}")
        if isinstance(choice, NamedTool):
            wanted = choice.function.name
            forced = [tool for tool in tools if tool.function.name == wanted]
            if not forced:
                names = ", ".join(tool.function.name for tool in tools)
                refuse("tool_choice", f"tool_choice names {wanted!r}, which is not among the tools: {names}")
            return cls(offered=tools, forced=forced, named=True)
        if choice == "required":
            return cls(offered=tools, forced=tools, several=several)
        return cls(offered=() if choice == "none" else tools)

    @property
    def free(self) -> bool:
        """Whether the model may call tools and need not."""
        return bool(self.offered) and not self.forced

    @cached_property
    def listed(self) -> list[dict[str, Any]]:
        """The offered tools as chat templates take them."""
        return [tool.model_dump(exclude_none=True) for tool in self.offered]


def grammar_of(
    tools: ToolUse,
    response_format: ResponseFormat | None,
    structured_outputs: StructuredOutputs | None,
    limits: Limits,
    *,
    marks: tuple[str, str] | None = None,
) -> tuple[Grammar | None, str]:
    """The grammar that a request asks for, and the field that asks. Raises ServeError for one that cannot be followed.

    Args:
        response_format: The form of the output that the request names in the words of its own format.
        marks: The texts around a tool call in free text, if calls are JSON objects with `name` and `arguments`.
    """
    if tools.forced:
        schema = call_schema(tools.forced, named=tools.named, several=tools.several)
        return _schema(schema, "tools", 0, limits), "tools"
    if response_format is not None and response_format.type != "text":
        return _of_format(response_format, limits), "response_format"
    if structured_outputs is not None:
        return _structured(structured_outputs, limits), "structured_outputs"
    if marks is not None and any(tool.function.strict for tool in tools.offered):
        return _calls(tools.offered, marks, limits), "tools"
    return None, ""


def _of_format(asked: ResponseFormat, limits: Limits) -> Grammar:
    if asked.type == "json_object":
        return any_json(WHITESPACE)
    if asked.json_schema is None or asked.json_schema.schema_ is None:
        refuse("response_format.json_schema", "response_format of type json_schema needs json_schema.schema")
    return _schema(asked.json_schema.schema_, "response_format.json_schema.schema", WHITESPACE, limits)


def call_schema(tools: Sequence[Tool], *, named: bool, several: bool = False) -> dict[str, Any]:
    """The schema of forced calls: the arguments of the named function, or an object with `name` and `parameters`.

    Args:
        several: Whether it is a list of one or more such objects.
    """
    if named:
        return tools[0].function.parameters or NOTHING
    calls, parameters = [], {}
    for i, tool in enumerate(tools):
        where = f"#/$defs/tool_{i}"
        parameters[f"tool_{i}"] = _moved(tool.function.parameters or NOTHING, where)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.function.name}, "parameters": {"$ref": where}},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    one = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return ({"type": "array", "items": one, "minItems": 1} if several else one) | {"$defs": parameters}


def _structured(asked: StructuredOutputs, limits: Limits) -> Grammar:
    kinds = [kind for kind in KINDS if getattr(asked, kind) not in (None, False) or (kind == "json_" and asked.json_)]
    names = ", ".join(kind.rstrip("_") for kind in KINDS[:-1])
    if len(kinds) != 1:
        requested = " and ".join(kind.rstrip("_") for kind in kinds) or "none"
        refuse("structured_outputs", f"structured_outputs takes exactly one of {names}; got {requested}")
    if asked.whitespace_pattern is not None:
        refuse_key("structured_outputs.whitespace_pattern", "give disable_any_whitespace, or write a grammar")
    space = 0 if asked.disable_any_whitespace else WHITESPACE
    if asked.json_object:
        return any_json(space)
    if asked.regex is not None:
        return regex(_short(asked.regex, "structured_outputs.regex", limits))
    if asked.choice is not None:
        _short(json.dumps(asked.choice), "structured_outputs.choice", limits)
        return choice(asked.choice)
    if asked.grammar is not None:
        return rules(_short(asked.grammar, "structured_outputs.grammar", limits))
    if asked.structural_tag is not None:
        return _tag(asked.structural_tag, space, limits)
    return _schema(asked.json_, "structured_outputs.json", space, limits)


def _calls(tools: Sequence[Tool], marks: tuple[str, str], limits: Limits) -> Grammar:
    """Free text in which every call is one of the tools, and those of strict tools have arguments that fit."""
    opens, closes = marks
    structures = []
    for tool in tools:
        name = json.dumps(tool.function.name, ensure_ascii=False)
        schema = (tool.function.parameters or NOTHING) if tool.function.strict else {"type": "object"}
        # Checked by itself, so that an error names the field.
        _schema(schema, "tools", WHITESPACE, limits)
        begin = f'{opens}\n{{"name": {name}, "arguments": '
        structures.append({"begin": begin, "schema": schema, "end": f"}}\n{closes}"})
    return structural_tag({"structures": structures, "triggers": [opens]}, WHITESPACE)


def _tag(tag: Any, whitespace: int, limits: Limits) -> Grammar:
    param = "structured_outputs.structural_tag"
    _short(tag if isinstance(tag, str) else json.dumps(tag), param, limits)
    try:
        return structural_tag(tag, whitespace)
    except InputError as error:
        refuse(param, str(error))


def _schema(schema: Any, param: str, whitespace: int, limits: Limits) -> Grammar:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            refuse(param, f"{param} is not JSON: {error}")
    if not isinstance(schema, dict | bool):
        refuse(param, f"{param} must be a JSON schema: an object, true or false")
    if deeper(schema, limits.max_schema_depth):
        refuse(param, f"{param} is nested more than {limits.max_schema_depth} levels deep")
    _short(json.dumps(schema), param, limits)
    try:
        return json_schema(schema, whitespace)
    except InputError as error:
        refuse(param, str(error))


def _short(text: str, param: str, limits: Limits) -> str:
    if len(text.encode(errors="replace")) > limits.max_schema_bytes:
        refuse(param, f"{param} is longer than {limits.max_schema_bytes} bytes")
    return text


def _moved(schema: Any, where: str) -> Any:
    """A schema whose references still hold where it stands inside another one.

    Example:
        >>> _moved({"$ref": "#/$defs/place"}, "#/$defs/tool_0")
        {'$ref': '#/$defs/tool_0/$defs/place'}
    """
    if isinstance(schema, list):
        return [_moved(each, where) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _moved(value, where) for key, value in schema.items()}
    if isinstance(moved.get("$ref"), str) and moved["$ref"].startswith("#"):
        moved["$ref"] = where + moved["$ref"][1:]
    return moved
