"""The form that an output must have: response formats, structured outputs and forced tool calls, as grammars."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.constraints.grammar import Grammar, any_json, choice, json_schema, regex, rules, structural_tag
from outrider.core.inputs import InputError
from outrider.serve.api.bodies import ChatBody, GenerationBody, NamedTool, StructuredOutputs, Tool
from outrider.serve.api.errors import ApiError, refuse, refuse_key
from outrider.serve.api.read import deeper
from outrider.serve.limits import Limits

WHITESPACE = 16
"""Most whitespace characters between two elements of JSON: a line break and the indentation of deep objects. Without a
bound, small models go on with it to the end."""
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of a function without parameters."""
KINDS = ("json_", "regex", "choice", "grammar", "json_object", "structural_tag")


def grammar_of(body: GenerationBody, limits: Limits, marks: tuple[str, str] | None = None) -> Grammar | None:
    """The grammar that a request asks for. Raises ApiError for one that cannot be followed.

    Args:
        marks: The texts around a tool call in free text, if calls are JSON objects with `name` and `arguments`.
    """
    asked = body.response_format
    if isinstance(body, ChatBody) and (tools := forced_tools(body)):
        named = isinstance(body.tool_choice, NamedTool)
        several = body.parallel_tool_calls and not named
        return _schema(call_schema(tools, named=named, several=several), "tools", 0, limits)
    if asked is not None and asked.type != "text":
        if asked.type == "json_object":
            return any_json(WHITESPACE)
        if asked.json_schema is None or asked.json_schema.schema_ is None:
            refuse("response_format.json_schema", "response_format of type json_schema needs json_schema.schema")
        return _schema(asked.json_schema.schema_, "response_format.json_schema.schema", WHITESPACE, limits)
    if body.structured_outputs is not None:
        return _structured(body.structured_outputs, limits)
    if marks is not None and isinstance(body, ChatBody) and (tools := strict_tools(body)):
        return _calls(tools, marks, limits)
    return None


def strict_tools(body: ChatBody) -> Sequence[Tool]:
    """The tools of which the model may call any, if one of them is strict; otherwise none."""
    tools = body.tools or []
    free = body.tool_choice in (None, "auto") and any(tool.function.strict for tool in tools)
    return tools if free else []


def forced_tools(body: ChatBody) -> Sequence[Tool]:
    """The tools of which the output must be a call; empty where nothing is forced."""
    tools, choice = body.tools or [], body.tool_choice
    if isinstance(choice, NamedTool):
        return [tool for tool in tools if tool.function.name == choice.function.name]
    return tools if choice == "required" else []


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


def field_of(body: GenerationBody) -> str | None:
    """The field that asks for a form."""
    if isinstance(body, ChatBody) and forced_tools(body):
        return "tools"
    if body.response_format is not None and body.response_format.type != "text":
        return "response_format"
    if body.structured_outputs is not None:
        return "structured_outputs"
    return "tools" if isinstance(body, ChatBody) and strict_tools(body) else None


def _structured(asked: StructuredOutputs, limits: Limits) -> Grammar:
    given = [kind for kind in KINDS if getattr(asked, kind) not in (None, False) or (kind == "json_" and asked.json_)]
    names = ", ".join(kind.rstrip("_") for kind in KINDS[:-1])
    if len(given) != 1:
        said = " and ".join(kind.rstrip("_") for kind in given) or "none"
        refuse("structured_outputs", f"structured_outputs takes exactly one of {names}; got {said}")
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
        raise ApiError(400, str(error), param=param) from None


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
    found = {key: _moved(value, where) for key, value in schema.items()}
    if isinstance(found.get("$ref"), str) and found["$ref"].startswith("#"):
        found["$ref"] = where + found["$ref"][1:]
    return found
