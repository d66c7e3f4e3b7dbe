"""JSON schemas as grammar libraries read them: the same outputs in fewer keywords, or fewer outputs."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from itertools import combinations
from math import lcm
from typing import Any

from outrider.core.inputs import parse_json
from outrider.core.types import InputError

Schema = Mapping[str, Any] | bool
SINGLE: tuple[str, ...] = (
    "items",
    "additionalItems",
    "unevaluatedItems",
    "contains",
    "additionalProperties",
    "unevaluatedProperties",
)
SINGLE += ("propertyNames", "contentSchema", "not", "if", "then", "else")
"""Keywords with one schema, or for `items` of old drafts a list of them."""
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
"""Keywords with a list of schemas."""
MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords with schemas by name."""
FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Formats that llguidance enforces."""
POINTERS = frozenset({"uri-reference", "uri-template", "json-pointer", "relative-json-pointer"})
"""Formats that llguidance refuses; formats that are named nowhere here are annotations."""
COMBINING = frozenset({"$ref", "anyOf", "oneOf", "allOf"})
OBJECT = frozenset({"properties", "required", "additionalProperties", "patternProperties", "propertyNames"})
OBJECT |= {"unevaluatedProperties", "minProperties", "maxProperties"}
"""Keywords about the properties of an object."""
LARGEST_MULTIPLE = 10_000
"""Largest `multipleOf` without the zeros at its end. For one in the billions, llguidance takes all memory."""
MOST_DIGITS = 400
"""From so many digits on, a number is too large without looking at it."""
ANNOTATIONS = ("deprecated", "contentSchema")
"""Keywords without effect that llguidance does not know."""
DAY = r"^(\d{3}[1-9]|\d{2}[1-9]\d|\d[1-9]\d{2}|[1-9]\d{3})-(02-([01]\d|2[0-8])|(0[13-9]|1[0-2])-)"
"""How a date begins that exists in every year; llguidance allows the year 0 and 30 February. Leap days are lost."""
CLASS = re.compile(r"\\.|\[\^?\]?((?:\\.|[^\]\\])*)\]", re.DOTALL)
CONTROL = re.compile(r"\\u00([01]|7f)")
"""A control character in JSON whose escape is no letter of its own."""
SET_OPERATOR = re.compile(r"\[|&&|--|~~")
ESCAPED = re.compile(r"\\.", re.DOTALL)


def read_schema(text: str) -> Schema:
    """The schema of a JSON text. Raises InputError if it is none."""
    schema = parse_json(text, "it")
    if not isinstance(schema, bool | dict):
        raise InputError(f"a schema is an object, true or false, got {text[:40]}")
    return schema


def changed(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """A schema with a change made to it and to all schemas inside it, the innermost first."""
    if not isinstance(schema, Mapping):
        return schema
    rebuilt: dict[str, Any] = {}
    for key, value in schema.items():
        if key in MAPS and isinstance(value, Mapping):
            rebuilt[key] = {name: changed(each, change) for name, each in value.items()}
        elif key in LISTS + SINGLE and isinstance(value, list):
            rebuilt[key] = [changed(each, change) for each in value]
        else:
            rebuilt[key] = changed(value, change) if key in SINGLE else value
    return change(rebuilt)


def within(schema: Any, at: str = "#") -> Iterator[tuple[Mapping[str, Any], str]]:
    """A schema and all schemas inside it, with their places; true and false are left out."""
    if not isinstance(schema, Mapping):
        return
    yield schema, at
    for key, value in schema.items():
        if key in MAPS and isinstance(value, Mapping):
            for name, each in value.items():
                yield from within(each, f"{at}/{key}/{name}")
        elif key in LISTS + SINGLE and isinstance(value, list):
            for i, each in enumerate(value):
                yield from within(each, f"{at}/{key}/{i}")
        elif key in SINGLE:
            yield from within(value, f"{at}/{key}")


def for_llguidance(schema: Schema) -> list[Schema]:
    """The schema as llguidance reads it; its outputs fit the given schema.

    Returns:
        One form or two. The last has all outputs of the given schema and must be compiled. The first is better where it
        can be compiled too: its objects have only the properties that they list.

    Raises:
        InputError: llguidance would let outputs through that do not fit.
    """
    for node, at in within(schema):
        _check(node, at)
    _check_multiples(schema)
    # References inside a schema with an identifier of its own lead into that schema.
    root = schema if all(at == "#" or "$id" not in node for node, at in within(schema)) else True
    exact = changed(schema, lambda node: _simplified(_without_one_of(node, root), root))
    narrow = exact if _combines(exact) else changed(exact, _closed)
    forms = [narrow] if narrow == exact else [narrow, exact]
    return [changed(form, _dated) for form in forms]


def check_pattern(pattern: str) -> None:
    r"""Raise InputError for a character class that Rust reads differently from ECMAScript and Python.

    Example:
        >>> check_pattern("[a&&b]")
        Traceback (most recent call last):
        ...
        outrider.core.inputs.InputError: '&&' in the character class '[a&&b]' has two meanings; put a
        backslash before it
    """
    for character_class in CLASS.finditer(pattern):
        if body := SET_OPERATOR.search(ESCAPED.sub("", character_class[1] or "")):
            raise InputError(
                f"{body[0]!r} in the character class {character_class[0]!r} has two meanings; put a backslash before it"
            )


def _check(node: Mapping[str, Any], at: str) -> None:
    least = node.get("minProperties")
    if isinstance(least, int) and least - len(set(_required(node))) > 1:
        raise InputError(f"'minProperties' (at {at}): a name may come twice and count once; require properties by name")
    exact = json.dumps([node.get("const"), node.get("enum"), [*_listed(node)]])
    if CONTROL.search(exact.replace(r"\\", "")):
        raise InputError(f"a control character in a value or name (at {at}) cannot be written; leave it out")
    patterns = [node["pattern"]] if isinstance(node.get("pattern"), str) else []
    if isinstance(named := node.get("patternProperties"), Mapping):
        patterns += map(str, named)
    for pattern in patterns:
        check_pattern(pattern)


def _check_multiples(schema: Schema) -> None:
    """Raise InputError if llguidance would need too much memory. It keeps a state for each remainder.

    Zeros at the end cost nothing: a multiple of 86400 is one of 864, with two zeros behind it. Where schemas are
    combined, several multiples may become their least common multiple.
    """
    nodes = list(within(schema))
    multiples = {at: _digits(node["multipleOf"]) for node, at in nodes if _is_number(node.get("multipleOf"))}
    for at, multiple in multiples.items():
        if multiple > LARGEST_MULTIPLE:
            raise InputError(f"'multipleOf' (at {at}) must be at most {LARGEST_MULTIPLE}, without the zeros at its end")
    if any({"allOf", "$ref"} & node.keys() for node, _ in nodes) and lcm(*multiples.values()) > LARGEST_MULTIPLE:
        raise InputError(
            f"the least common multiple of all 'multipleOf' must be at most {LARGEST_MULTIPLE}, because the schema has "
            "'allOf' or '$ref'"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _digits(number: float) -> int:
    """The digits of a number as a whole number, without zeros at the end.

    Example:
        >>> _digits(86400), _digits(0.25), _digits(1e30)
        (864, 25, 1)
    """
    digits = "".join(map(str, Decimal(repr(number)).as_tuple().digits))
    return int(digits.rstrip("0") or "0") if len(digits) < MOST_DIGITS else LARGEST_MULTIPLE + 1


def _simplified(node: dict[str, Any], root: Schema) -> dict[str, Any]:
    """The same schema in keywords that llguidance knows, as far as there are any."""
    node = {key: value for key, value in node.items() if key not in ANNOTATIONS}
    if node.get("uniqueItems") is False:
        del node["uniqueItems"]
    if isinstance(node.get("format"), str) and node["format"] not in FORMATS | POINTERS:
        del node["format"]
    if not COMBINING & node.keys():
        for general, plain in (("unevaluatedItems", "items"), ("unevaluatedProperties", "additionalProperties")):
            if general in node:
                node.setdefault(plain, node[general])
                del node[general]
    return _with_named_properties(node, root)


def _without_one_of(node: dict[str, Any], root: Schema) -> dict[str, Any]:
    """`anyOf` for a `oneOf` whose parts exclude each other. llguidance looks for this too, but not behind `$ref`."""
    parts = node.get("oneOf")
    if "anyOf" in node or not isinstance(parts, list):
        return node
    if not all(_exclude(a, b, root) for a, b in combinations(parts, 2)):
        return node
    return {"anyOf" if key == "oneOf" else key: value for key, value in node.items()}


def _exclude(one: Any, other: Any, root: Schema) -> bool:
    """Whether two schemas surely have no value in common: by type, or by texts that tag an object."""
    one, other = _resolved(one, root), _resolved(other, root)
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return False
    if (types := _types(one) & _types(other)) != {"object"}:
        return not types
    tags, others = _listed(one), _listed(other)
    for name in {*_required(one), *_required(other)} & tags.keys() & others.keys():
        texts, other_texts = _texts(_resolved(tags[name], root)), _texts(_resolved(others[name], root))
        if texts and other_texts and not texts & other_texts:
            return True
    return False


def _required(schema: Mapping[str, Any]) -> list[str]:
    """Names of required properties."""
    names = schema.get("required")
    return list(map(str, names)) if isinstance(names, list) else []


def _listed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The properties that a schema lists."""
    return named if isinstance(named := schema.get("properties"), Mapping) else {}


def _resolved(schema: Any, root: Schema) -> Any:
    """The schema that a reference leads to; other schemas as they are."""
    for _ in range(9):
        if not isinstance(schema, Mapping) or not str(schema.get("$ref", "")).startswith("#/"):
            return schema
        part: Any = root
        for name in schema["$ref"].split("/")[1:]:
            part = part.get(name) if isinstance(part, Mapping) else None
        schema = part
    return None


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Types of a schema's values, integers among the numbers."""
    named = schema.get("type", ["null", "boolean", "number", "string", "array", "object"])
    return {"number" if each == "integer" else str(each) for each in (named if isinstance(named, list) else [named])}


def _texts(schema: Any) -> set[str]:
    """The texts that a schema lists; none if it has other values."""
    if not isinstance(schema, Mapping):
        return set()
    values = schema.get("enum", [schema.get("const")])
    return set(values) if isinstance(values, list) and all(isinstance(each, str) for each in values) else set()


def _with_named_properties(node: dict[str, Any], root: Schema) -> dict[str, Any]:
    """Names from a list, or names that one pattern describes, as properties."""
    names = _resolved(node.get("propertyNames"), root)
    if OBJECT & node.keys() - {"propertyNames", "additionalProperties"} or not isinstance(names, Mapping):
        return node
    keywords = names.keys() - {"type", "title", "description"}
    if names.get("type", "string") != "string":
        return node
    value = node.get("additionalProperties", True)
    rest = {key: each for key, each in node.items() if key not in ("propertyNames", "additionalProperties")}
    if keywords == {"enum"} or keywords == {"const"}:
        allowed = names["enum"] if "enum" in names else [names["const"]]
        listed = {name: value for name in allowed if isinstance(name, str)}
        return {**rest, "properties": listed, "additionalProperties": False}
    if keywords == {"pattern"}:
        return {**rest, "patternProperties": {names["pattern"]: value}, "additionalProperties": False}
    if keywords and keywords <= {"minLength", "maxLength"}:
        length = f"{names.get('minLength', 0)},{names.get('maxLength', '')}"
        return {**rest, "patternProperties": {f"^(?s:.){{{length}}}$": value}, "additionalProperties": False}
    return node


def _combines(schema: Schema) -> bool:
    """Whether properties of one object come from several schemas; a closed part would exclude those of the others."""
    for node, _ in within(schema):
        several = isinstance(node.get("allOf"), list) and len(node["allOf"]) > 1
        if several or len(COMBINING & node.keys()) + bool(OBJECT & node.keys()) > 1:
            return True
    return False


def _closed(node: dict[str, Any]) -> dict[str, Any]:
    """An object with listed properties and no word about others has no others."""
    listed, open_ended = _listed(node), OBJECT - {"properties", "required", "maxProperties"}
    if not listed or open_ended & node.keys() or not set(_required(node)) <= listed.keys():
        return node
    return {**node, "additionalProperties": False}


def _dated(node: dict[str, Any]) -> dict[str, Any]:
    """Dates that exist."""
    if node.get("format") not in ("date", "date-time"):
        return node
    parts = node.get("allOf", [])
    return {**node, "allOf": [*parts, {"pattern": DAY}]} if isinstance(parts, list) else node
