"""JSON schemas and regular expressions: the parts that the grammar compiler silently ignores are refused here.

xgrammar ignores what it cannot express, or only warns. An output could then fit the grammar and break the schema.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from outrider.core.inputs import parse_json
from outrider.core.types import InputError

SPREAD = frozenset({"not", "if", "then", "else", "contains", "dependentRequired", "dependentSchemas", "dependencies"})
SPREAD |= {"uniqueItems", "minContains", "maxContains", "additionalItems", "$dynamicRef", "$recursiveRef"}
"""Keywords that restrict the output and are never enforced."""
SCALARS = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "boolean": frozenset[str](),
    "null": frozenset[str](),
}
ARRAY = frozenset({"items", "prefixItems", "unevaluatedItems", "minItems", "maxItems"})
OBJECT = frozenset({"properties", "required", "additionalProperties", "unevaluatedProperties", "patternProperties"})
OBJECT |= {"propertyNames", "minProperties", "maxProperties"}
BY_TYPE = SCALARS | {"array": ARRAY, "object": OBJECT}
"""Keywords that are enforced if the schema names the type."""
FORMS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""Keywords that decide alone, in the order in which they are looked for. The compiler does not read the keywords beside
them."""
OF_TYPES: frozenset[str] = frozenset().union(*BY_TYPE.values())
ASSERTIONS = SPREAD | OF_TYPES | {"type", *FORMS}
"""All keywords that restrict the output. Other keywords are annotations."""
TELLING = {"array": frozenset({"items", "prefixItems", "unevaluatedItems"})}
TELLING["object"] = frozenset({"properties", "additionalProperties", "unevaluatedProperties"})
"""Keywords from which the compiler infers the type if the schema names none."""
APART: tuple[tuple[str, frozenset[str], str], ...] = (
    ("pattern", frozenset({"minLength", "maxLength"}), "put the length into the pattern"),
    ("format", frozenset({"minLength", "maxLength", "pattern"}), "write one pattern for all of it"),
    ("multipleOf", BY_TYPE["number"], "list the values in an enum"),
    ("patternProperties", frozenset({"properties", "propertyNames"}), "list the properties by name"),
    ("propertyNames", frozenset({"properties"}), "list the properties by name"),
)
"""Keywords that are not enforced together with others, and what to do instead."""
PYTHON: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}
PYTHON |= {"array": list, "object": dict}
FORMATS = frozenset({"email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri"})
FORMATS |= {"uri-reference", "uri-template", "json-pointer", "relative-json-pointer"}
"""Formats that are enforced. Others are annotations."""
ESCAPES = "aefnrtv0dDwWsSxucbBpPk123456789"
"""Letters and digits that xgrammar understands, or refuses itself, behind a backslash."""


def check_schema(text: str) -> None:
    """Raise InputError if a part of the schema restricts the output and is not enforced.

    `oneOf` is enforced as `anyOf`: the schema itself must ensure that only one alternative holds.

    Example:
        >>> check_schema('{"type": "array", "uniqueItems": true}')
        Traceback (most recent call last):
        ...
        outrider.core.inputs.InputError: 'uniqueItems' (at #) is not supported; leave it out, or check the output
        yourself
    """
    schema = parse_json(text, "it")
    if not isinstance(schema, bool | dict):
        raise InputError(f"a schema is an object, true or false, got {text[:40]}")
    _Walk(root=schema).check(schema, "#")


def check_pattern(pattern: str) -> None:
    """Raise InputError if a regular expression has an anchor in its middle, or an unknown escape.

    Example:
        >>> check_pattern("a$b")
        Traceback (most recent call last):
        ...
        outrider.core.inputs.InputError: '$' at position 2 is not at the end of the pattern or of an alternative; leave
        it out
    """
    depth, i = 0, 0
    while i < len(pattern):
        letter = pattern[i]
        if letter == "\\":
            escaped = pattern[i + 1 : i + 2]
            if escaped.isalnum() and escaped not in ESCAPES:
                raise InputError(f"the escape '\\{escaped}' at position {i + 1} is not supported")
            i += 1
        elif letter == "[":
            i = _class_end(pattern, i)
        elif letter in "()":
            depth += 1 if letter == "(" else -1
        elif letter == "^" and (depth or pattern[max(i - 1, 0) : i] not in ("", "|")):
            raise InputError(_misplaced("^", i, "beginning"))
        elif letter == "$" and (depth or pattern[i + 1 : i + 2] not in ("", "|")):
            raise InputError(_misplaced("$", i, "end"))
        i += 1


def _class_end(pattern: str, first: int) -> int:
    """Index of the bracket that closes the one at `first`; the pattern's end if none does."""
    i = first + 1
    while i < len(pattern) and pattern[i] != "]":
        i += 2 if pattern[i] == "\\" else 1
    return i


def _misplaced(anchor: str, at: int, where: str) -> str:
    return f"'{anchor}' at position {at + 1} is not at the {where} of the pattern or of an alternative; leave it out"


@dataclass(frozen=True, kw_only=True)
class _Walk:
    """A walk through a schema and all schemas that it refers to.

    Attributes:
        seen: References that were followed already.
    """

    root: object
    seen: set[str] = field(default_factory=set)

    def check(self, schema: object, at: str) -> None:
        """Check a schema and the schemas inside it."""
        if not isinstance(schema, Mapping):
            return
        said = {key for key in ASSERTIONS.intersection(schema) if key != "uniqueItems" or schema[key] is not False}
        if str(schema.get("format")) not in FORMATS:
            said.discard("format")
        if spread := sorted(said & SPREAD):
            raise _refused(spread[0], at, "leave it out, or check the output yourself")
        decisive = next((form for form in FORMS if form in schema), None)
        self._check_form(schema, said, decisive, at)
        for inner, place in _within(schema, decisive):
            self.check(inner, f"{at}/{place}")

    def _check_form(self, schema: Mapping[str, object], said: set[str], form: str | None, at: str) -> None:
        """Check which keywords stand beside each other."""
        if form is None:
            _check_types(schema, said, at)
            return
        others = said - {form}
        if form in ("const", "enum") and _fits(schema, form):
            others -= {"type"}
        if others:
            word = sorted(others)[0]
            raise _refused(word, at, f"it is not read beside '{form}'; write it where '{form}' leads")
        given = schema[form]
        if form == "$ref":
            self._follow(str(given), at)
        if form == "allOf" and isinstance(given, list) and len(given) > 1:
            raise _refused("allOf", at, "write its parts as one schema")

    def _follow(self, place: str, at: str) -> None:
        """Check the schema that a reference leads to. The compiler checks that it exists."""
        if place in self.seen:
            return
        self.seen.add(place)
        if place != "#" and not place.startswith("#/"):
            raise InputError(f"'$ref' (at {at}) leads to {place!r}; it must lead into the schema, as in #/$defs/x")
        found = self.root
        for name in place.split("/")[1:]:
            found = found.get(name) if isinstance(found, Mapping) else None
        self.check(found, place)


def _check_types(schema: Mapping[str, object], said: set[str], at: str) -> None:
    """Check a schema with or without a type. Keywords of other types restrict nothing."""
    named = schema.get("type")
    types = {str(each) for each in named} if isinstance(named, list) else {str(named)} if named else set()
    if not types:
        told = next((kind for kind in ("object", "array") if TELLING[kind] & said), None)
        if missed := sorted(said - (BY_TYPE[told] if told else set())):
            raise _refused(missed[0], at, "name the type that it belongs to")
    for one, others, way in APART:
        if one in said and (other := sorted(others & said)):
            raise _refused(one, at, f"it is not read beside '{other[0]}'; {way}")
    if "multipleOf" in said and "number" in types:
        raise _refused("multipleOf", at, "it is enforced for integers alone")
    if isinstance(least := schema.get("minProperties"), int) and least > 1 and not _names_are_given(schema):
        raise _refused("minProperties", at, "a name may come twice and count once; require the properties by name")
    if isinstance(patterns := schema.get("patternProperties"), Mapping) and len(patterns) > 1:
        raise _refused("patternProperties", at, "a name may match two patterns; write them as one pattern")
    properties, required = schema.get("properties"), schema.get("required")
    for name in required if isinstance(required, list) and (not types or "object" in types) else ():
        if not isinstance(properties, Mapping) or str(name) not in properties:
            raise InputError(f"{name!r} is required (at {at}) and not among the properties; add it to them")
    if isinstance(pattern := schema.get("pattern"), str):
        check_pattern(pattern)


def _names_are_given(schema: Mapping[str, object]) -> bool:
    """Whether an object can only have the properties that are listed."""
    others = (schema.get("additionalProperties"), schema.get("unevaluatedProperties"))
    return "properties" in schema and all(other in (None, False) for other in others)


def _within(schema: Mapping[str, object], form: str | None) -> Iterator[tuple[object, str]]:
    """The schemas inside a schema, and their places."""
    if form is not None:
        given = schema[form] if form in ("anyOf", "oneOf", "allOf") else ()
        if isinstance(given, list):
            yield from ((each, f"{form}/{i}") for i, each in enumerate(given))
        return
    for key in ("items", "unevaluatedItems", "additionalProperties", "unevaluatedProperties"):
        yield schema.get(key), key
    if isinstance(given := schema.get("propertyNames"), Mapping):
        yield given if any(form in given for form in FORMS) else {"type": "string", **given}, "propertyNames"
    for key in ("properties", "patternProperties"):
        if isinstance(given := schema.get(key), Mapping):
            yield from ((each, f"{key}/{name}") for name, each in given.items())
            if key == "patternProperties":
                for name in given:
                    check_pattern(str(name))
    if isinstance(given := schema.get("prefixItems"), list):
        yield from ((each, f"prefixItems/{i}") for i, each in enumerate(given))


def _fits(schema: Mapping[str, object], form: str) -> bool:
    """Whether all values that a schema lists have the type that it names."""
    named = schema.get("type")
    types = named if isinstance(named, list) else [named]
    values = schema["enum"] if form == "enum" else [schema["const"]]
    return isinstance(values, list) and all(any(_is(value, str(each)) for each in types) for value in values)


def _is(value: object, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, PYTHON.get(kind, ()))


def _refused(word: str, at: str, way: str) -> InputError:
    return InputError(f"'{word}' (at {at}) is not supported; {way}")
