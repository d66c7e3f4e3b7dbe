"""What is not refused is enforced: the compiled grammar takes what fits the schema and nothing that does not."""

import json

import pytest

from outrider import InputError
from outrider.constraints.schema import check_pattern, check_schema

xgrammar = pytest.importorskip("xgrammar")
accepts = pytest.importorskip("xgrammar.testing")._is_grammar_accept_string

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ENFORCED = [
    ({"type": "integer", "minimum": 2, "exclusiveMaximum": 5, "uniqueItems": False}, 2, 5),
    ({"type": "integer", "multipleOf": 3}, 9, 10),
    ({"type": ["string", "null"], "pattern": "^a+$", "minimum": 3}, "aa", "b"),
    ({"type": "string", "minLength": 2, "format": "password"}, "ab", "a"),
    ({"type": "string", "pattern": "^b$", "format": "password"}, "b", "a"),
    ({"type": "string", "format": "date"}, "2026-11-21", "soon"),
    ({"type": "string", "enum": ["a", "b"], "description": "one of two"}, "a", "c"),
    ({"type": ["boolean", "integer"], "const": 1}, 1, True),
    ({"anyOf": [{"type": "integer", "maximum": 5}, {"type": "null"}], "default": None}, 5, 6),
    ({"oneOf": [{"const": "a"}, {"const": "b"}]}, "b", "c"),
    ({"allOf": [{"type": "integer", "maximum": 5}], "title": "x"}, 5, 6),
    ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}, "unused": {"not": {}}}}, 1, "a"),
    ({"definitions": {"n": OBJECT}, "type": "array", "items": {"$ref": "#/definitions/n"}}, [{"a": 1}], [{}]),
    ({"type": "array", "prefixItems": [{"type": "null"}], "items": {"type": "integer"}, "maxItems": 2}, [None, 1], [1]),
    ({"items": {"type": "integer"}, "minItems": 2}, [1, 2], [1]),
    (OBJECT, {"a": 1}, {"a": 1, "b": 2}),
    (OBJECT | {"additionalProperties": {"type": "null"}, "maxProperties": 2}, {"a": 1, "b": None}, {"a": 1, "b": 1}),
    ({"properties": {"a": {"type": "integer"}, "b": {}}, "minProperties": 2}, {"a": 1, "b": [{}]}, {"a": 1}),
    ({"type": "object", "patternProperties": {"^x[a-z]$": {"type": "null"}}}, {"xy": None}, {"xy": 1}),
    ({"type": "object", "propertyNames": {"enum": ["a"]}, "additionalProperties": {}}, {"a": 3}, {"b": 3}),
    ({"type": "object", "propertyNames": {"pattern": "^b$"}, "additionalProperties": {}}, {"b": 3}, {"a": 3}),
    ({"unevaluatedItems": {"type": "null"}}, [None], [1]),
]
REFUSED = [
    ({"not": {"type": "string"}}, "a", "'not' (at #) is not supported"),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, [1, 1], "'uniqueItems' (at #)"),
    ({"type": "array", "items": {"type": "integer"}, "contains": {"const": 1}}, [2], "'contains'"),
    ({"type": "integer", "if": {"minimum": 5}, "then": {"maximum": 7}}, 9, "'if'"),
    ({"allOf": [{"type": "integer"}, {"maximum": 5}]}, 9, "'allOf' (at #) is not supported; write its parts as one"),
    (
        {"type": "integer", "anyOf": [{"minimum": 5}]},
        "a",
        "'type' (at #) is not supported; it is not read",
    ),
    ({"type": "string", "const": 1}, 1, "it is not read beside 'const'"),
    ({"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n", "maximum": 5}, 9, "it is not read beside '$ref'"),
    ({"$defs": {"n": {"minimum": 5}}, "items": {"$ref": "#/$defs/n"}}, [3], "'minimum' (at #/$defs/n)"),
    ({"$defs": {"n": {"$anchor": "n", "type": "null"}}, "$ref": "#n"}, 1, "it must lead into the schema"),
    ({"minimum": 5}, 3, "name the type that it belongs to"),
    ({"pattern": "^a$"}, "b", "name the type"),
    ({"required": ["a"]}, {}, "name the type"),
    ({"properties": {"a": {}}, "items": {"type": "null"}}, None, "'items' (at #)"),
    ({"type": "object", "required": ["a"], "additionalProperties": True}, {}, "'a' is required (at #) and not among"),
    ({"type": "string", "pattern": "^a+$", "maxLength": 2}, "aaa", "put the length into the pattern"),
    ({"type": "string", "format": "date", "pattern": "^a$"}, "2026-11-21", "'format' (at #)"),
    ({"type": "number", "multipleOf": 0.5}, 1.3, "'multipleOf'"),
    ({"type": "integer", "multipleOf": 3, "minimum": 0}, None, "'multipleOf'"),
    (
        {"type": "object", "properties": {"xa": {}}, "patternProperties": {"^x": {"type": "null"}}},
        {"xa": 9},
        "list",
    ),
    ({"type": "object", "properties": {"a": {}}, "propertyNames": {"pattern": "^x"}}, {"a": 1}, "'propertyNames'"),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}}, {"a": 1}, "'dependentR"),
    ({"type": "string", "pattern": "^a$b$"}, "ab", "'$' at position 3"),
    ({"anyOf": [OBJECT, {"type": "array", "items": {"not": {}}}]}, [1], "'not' (at #/anyOf/1/items)"),
]


def compiled(schema: object) -> object:
    return xgrammar.Grammar.from_json_schema(json.dumps(schema), any_whitespace=True)


@pytest.mark.parametrize(("schema", "good", "bad"), ENFORCED, ids=lambda value: json.dumps(value))
def test_what_passes_is_enforced(schema, good, bad):
    check_schema(json.dumps(schema))
    assert accepts(compiled(schema), json.dumps(good))
    assert not accepts(compiled(schema), json.dumps(bad))


@pytest.mark.parametrize(("schema", "escapes", "sentence"), REFUSED, ids=lambda value: json.dumps(value))
def test_what_is_passed_over_in_silence_is_refused(schema, escapes, sentence):
    """Each of these schemas is refused because the compiled grammar lets something through that does not fit it."""
    with pytest.raises(InputError) as refused:
        check_schema(json.dumps(schema))
    assert sentence in str(refused.value)
    if escapes is not None:
        assert accepts(compiled(schema), json.dumps(escapes))


def test_a_property_that_comes_twice_counts_once():
    schema = {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 2}
    assert accepts(compiled(schema), '{"a": 1, "a": 2}')
    with pytest.raises(InputError, match="a name may come twice and count once"):
        check_schema(json.dumps(schema))


def test_a_schema_that_refers_to_itself_is_walked_once():
    node = {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["next"],
    }
    check_schema(json.dumps(node))
    assert accepts(compiled(node), '{"next": {"next": null}}')


@pytest.mark.parametrize(
    "text", ["", "{'a': 1}", "[1]", "3", '{"a":', "[" * 100_000, '{"type": {}, "format": [], "enum": 3}']
)
def test_what_is_no_schema_gets_a_sentence(text):
    with pytest.raises(InputError, match=r"it is not JSON|nested too deeply|a schema is an object|is not read"):
        check_schema(text)


@pytest.mark.parametrize("pattern", ["^abc$", "^a|b$", r"\$a\^", "[$^]a[^b$]", r"[\]$]a$", r"\d+\.\w", "", "a["])
def test_patterns_that_mean_what_they_say_pass(pattern):
    check_pattern(pattern)


@pytest.mark.parametrize("pattern", ["a$b", "a^b", "(a$)b", "a(^b)", r"\Z", r"a\_?\q", r"\A", "a$?"])
def test_anchors_inside_and_meaningless_escapes_are_refused(pattern):
    with pytest.raises(InputError, match=r"at position [1-5]"):
        check_pattern(pattern)
