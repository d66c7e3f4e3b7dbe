"""What is not refused is enforced: a bound schema takes what fits it and nothing that does not."""

import json
from enum import Enum
from typing import Annotated, Literal

import pydantic
import pytest

import outrider
from outrider import InputError
from outrider.constraints.automaton import GrammarConstraint
from outrider.constraints.grammar import json_schema
from outrider.constraints.schema import check_pattern
from outrider.core.sampling import unpacked
from outrider.engine.engine import Engine

pytest.importorskip("llguidance")

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAGGED = [{"type": "object", "properties": {"t": {"const": t}}, "required": ["t"]} for t in "ab"]
NODE = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"]}
ENFORCED = [
    ({"type": "integer", "minimum": 2, "exclusiveMaximum": 5, "uniqueItems": False}, 2, 5),
    ({"type": "integer", "multipleOf": 3}, 9, 10),
    ({"type": "integer", "multipleOf": 3, "minimum": 4}, 6, 3),
    ({"type": "number", "multipleOf": 0.5}, 1.5, 1.3),
    ({"type": "integer", "multipleOf": 86400000}, 172800000, 86400001),
    ({"type": "array", "items": {"anyOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}}, [19946, 9967], [9970]),
    ({"type": ["string", "null"], "pattern": "^a+$", "minimum": 3}, "aa", "b"),
    ({"type": "string", "pattern": "^a+$", "maxLength": 2}, "aa", "aaa"),
    ({"type": "string", "pattern": "b"}, "abc", "ac"),
    ({"type": "string", "minLength": 2, "format": "password"}, "ab", "a"),
    ({"type": "string", "format": "date"}, "2026-11-21", "soon"),
    ({"type": "string", "format": "date"}, "2026-02-28", "2026-02-30"),
    ({"type": "string", "format": "date", "pattern": "^20"}, "2026-02-28", "1026-02-28"),
    ({"type": "string", "enum": ["a", "b"], "description": "one of two"}, "a", "c"),
    ({"type": ["boolean", "integer"], "const": 1}, 1, True),
    ({"anyOf": [{"type": "integer", "maximum": 5}, {"type": "null"}], "default": None}, 5, 6),
    ({"type": "integer", "anyOf": [{"minimum": 5}, {"maximum": 2}]}, 6, 4),
    ({"oneOf": [{"const": "a"}, {"const": "b"}]}, "b", "c"),
    ({"oneOf": [{"$ref": "#/$defs/a"}, TAGGED[1]], "$defs": {"a": TAGGED[0]}}, {"t": "b"}, {}),
    ({"allOf": [{"type": "integer"}, {"maximum": 5}], "title": "x"}, 5, 6),
    ({"allOf": [OBJECT, {"properties": {"b": {"type": "null"}}}]}, {"a": 1, "b": None}, {"a": 1, "b": 1}),
    ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}, "unused": {"not": {}}}}, 1, "a"),
    ({"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n", "maximum": 5}, 5, 9),
    ({"$defs": {"n": {"minimum": 5}}, "items": {"$ref": "#/$defs/n"}}, [7], [3]),
    ({"definitions": {"n": OBJECT}, "type": "array", "items": {"$ref": "#/definitions/n"}}, [{"a": 1}], [{}]),
    ({"type": "array", "prefixItems": [{"type": "null"}], "items": {"type": "integer"}, "maxItems": 2}, [None, 1], [1]),
    ({"items": {"type": "integer"}, "minItems": 2}, [1, 2], [1]),
    (OBJECT, {"a": 1}, {"a": 1, "b": 2}),
    (OBJECT | {"additionalProperties": {"type": "null"}, "maxProperties": 2}, {"a": 1, "b": None}, {"a": 1, "b": 1}),
    ({"type": "object", "required": ["a"], "additionalProperties": True}, {"a": []}, {}),
    ({"required": ["a"]}, {"a": 1}, {"b": 1}),
    ({"minimum": 5}, 5, 3),
    ({"enum": ["a\n\t", r"\u0001", "\U0001f600é"]}, "a\n\t", "a\\t"),
    ({"type": "object", "patternProperties": {"^x[a-z]$": {"type": "null"}}}, {"xy": None}, {"xy": 1}),
    (
        {"type": "object", "properties": {"xa": {}}, "patternProperties": {"^x": {"type": "null"}}},
        {"xa": None},
        {"xa": 9},
    ),
    ({"type": "object", "propertyNames": {"enum": ["a"]}, "additionalProperties": {}}, {"a": 3}, {"b": 3}),
    ({"type": "object", "propertyNames": {"pattern": "^b$"}, "additionalProperties": {}}, {"b": 3}, {"a": 3}),
    ({"type": "object", "propertyNames": {"maxLength": 2}}, {"bc": 3}, {"bcd": 3}),
    ({"unevaluatedItems": {"type": "null"}}, [None], [1]),
    (OBJECT | {"unevaluatedProperties": {"type": "null"}}, {"a": 1, "b": None}, {"a": 1, "b": 1}),
    (NODE, {"next": {"next": None}}, {"next": {}}),
]
REFUSED = [
    ({"not": {"type": "string"}}, 'Unimplemented keys: ["not"]'),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, '["uniqueItems"]'),
    ({"type": "array", "items": {"type": "integer"}, "contains": {"const": 1}}, '["contains"]'),
    ({"type": "integer", "if": {"minimum": 5}, "then": {"maximum": 7}}, '["if", "then"]'),
    ({"type": "string", "const": 1}, "Unsatisfiable schema"),
    ({"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/m"}, "Pointer '/$defs/m' does not exist"),
    ({"oneOf": [{"minimum": 2}, {"maximum": 5}]}, "oneOf constraints are not supported"),
    ({"type": "string", "format": "date", "pattern": "^a$"}, "Unsatisfiable schema"),
    ({"type": "object", "properties": {"a": {}}, "propertyNames": {"pattern": "^x"}}, '"propertyNames"'),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}}, '"dependentRequired"'),
    ({"type": "string", "pattern": "^a$b$"}, "lookarounds not supported"),
    ({"type": "string", "pattern": "[a&&b]"}, "'&&' in the character class '[a&&b]' has two meanings"),
    ({"anyOf": [OBJECT, {"type": "array", "items": {"not": {}}}]}, '["not"]'),
    ({"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 2}, "a name may come twice"),
    ({"type": "object", "patternProperties": {"^a": {"type": "integer"}, "b$": {"type": "null"}}}, "disjoint"),
    ({"type": "string", "format": "json-pointer", "pattern": "a"}, "Unknown format: json-pointer"),
    ({"type": "string", "format": "uri-template", "maxLength": 3}, "Unknown format: uri-template"),
    ({"type": "integer", "multipleOf": 2**31}, "'multipleOf' (at #) must be at most 10000"),
    ({"type": "integer", "multipleOf": 1000000007}, "'multipleOf' (at #) must be at most 10000"),
    ({"type": "integer", "multipleOf": int("7" * 500)}, "'multipleOf' (at #) must be at most 10000"),
    ({"type": "array", "items": {"multipleOf": 0.010007}}, "'multipleOf' (at #/items) must be at most 10000"),
    ({"allOf": [{"type": "integer", "multipleOf": 997}, {"multipleOf": 991}]}, "the least common multiple of all"),
    ({"type": "nope"}, "nope"),
    (False, "cannot accept any value"),
    ({"const": "a\u0001"}, "a control character in a value or name (at #) cannot be written"),
    ({"type": "array", "items": {"type": "string", "format": "uri-reference"}}, "uri-reference"),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 2}, "require properties by name"),
]


@pytest.fixture(scope="module")
def pair() -> Engine:
    return outrider.load(drafter="none", dtype="float32")


def bound(schema: object, engine: Engine) -> GrammarConstraint:
    return json_schema(schema).bind(engine.tokenizer, 8192, engine.eos_ids)


def takes(constraint: GrammarConstraint, engine: Engine, text: str) -> bool:
    """Whether a text may come and the output may end after it."""
    state = constraint.open()
    if not all(state.matcher.accept(token) for token in engine.encode(text)):
        return False
    row = unpacked(constraint.masks(state, [0], [-1]), 8192)[0] if not _stuck(constraint, state) else None
    return row is not None and bool(row[sorted(engine.eos_ids)].all())


def _stuck(constraint: GrammarConstraint, state: object) -> bool:
    try:
        constraint.masks(state, [0], [-1])
    except InputError:
        return True
    return False


@pytest.mark.parametrize(("schema", "good", "bad"), ENFORCED, ids=lambda value: json.dumps(value))
def test_what_llguidance_keeps_is_enforced(pair, schema, good, bad):
    constraint = bound(schema, pair)
    assert takes(constraint, pair, json.dumps(good))
    assert not takes(constraint, pair, json.dumps(bad))


@pytest.mark.parametrize(("schema", "sentence"), REFUSED, ids=lambda value: json.dumps(value))
def test_what_llguidance_does_not_keep_is_refused_with_the_reason(pair, schema, sentence):
    with pytest.raises(InputError) as refused:
        bound(schema, pair)
    said = str(refused.value)
    assert said.startswith("the JSON schema cannot be compiled: ")
    assert sentence in said
    assert "\n" not in said


def test_a_schema_cannot_relax_itself(pair):
    """llguidance reads options inside a schema; this one would ignore what it does not know."""
    with pytest.raises(InputError, match=r"Unimplemented keys: .*contains"):
        bound({"type": "array", "contains": {"const": 1}, "x-guidance": {"lenient": True}}, pair)


def test_no_escape_spells_the_name_of_a_listed_property(pair):
    constraint = bound(OBJECT | {"additionalProperties": {"type": "null"}}, pair)
    assert not takes(constraint, pair, r'{"a": 1, "\u0061": null}')
    assert takes(constraint, pair, r'{"a": 1, "b\n": null}')


def test_properties_that_are_not_listed_come_only_where_a_schema_says_so_or_combines_parts(pair):
    beyond = '{"a": 1, "b": 2}'
    assert not takes(bound(OBJECT, pair), pair, beyond)
    assert takes(bound(OBJECT | {"additionalProperties": True}, pair), pair, beyond)
    assert takes(bound({"allOf": [OBJECT, {"required": ["b"]}]}, pair), pair, beyond)
    assert takes(bound(OBJECT | {"required": ["a", "b"]}, pair), pair, beyond)


def test_parts_of_a_one_of_that_only_closing_would_tell_apart_are_refused(pair):
    """{"a": 1} fits both parts as they are written."""
    parts = [OBJECT, {"type": "object", "properties": {"b": {"type": "null"}}}]
    with pytest.raises(InputError, match="oneOf"):
        bound({"oneOf": parts}, pair)


class Kind(Enum):
    CAT = "cat"
    DOG = "dog"


class Toy(pydantic.BaseModel):
    """A toy."""

    tag: Literal["toy"]
    price: Annotated[float, pydantic.Field(ge=0, lt=100)] | None = None


class Treat(pydantic.BaseModel):
    """A treat."""

    tag: Literal["treat"]
    secret: pydantic.SecretStr = pydantic.Field(pydantic.SecretStr(""), deprecated=True)


class Pet(pydantic.BaseModel):
    """A pet."""

    kind: Kind
    names: dict[Kind, int]
    things: list[Annotated[Toy | Treat, pydantic.Field(discriminator="tag")]]
    friend: "Pet | None" = None


def test_a_pydantic_class_is_a_schema(pair):
    constraint = bound(Pet, pair)
    toy = {"tag": "toy", "price": 1.5}
    friend = {"kind": "cat", "names": {}, "things": []}
    whole = {"kind": "dog", "names": {"cat": 1}, "things": [toy, {"tag": "treat"}], "friend": friend}
    assert takes(constraint, pair, json.dumps(whole))
    Pet.model_validate(whole)
    for wrong in ({"kind": "cow"}, {"names": {"cow": 1}}, {"things": [{"tag": "treat", "price": 1.5}]}, {"friend": 3}):
        assert not takes(constraint, pair, json.dumps(whole | wrong))
        if wrong.get("things") is None:
            with pytest.raises(pydantic.ValidationError):
                Pet.model_validate(whole | wrong)


@pytest.mark.parametrize(
    "text", ["", "{'a': 1}", "[1]", "3", '{"a":', "[" * 100_000, '{"items":' * 900 + "{}" + "}" * 900]
)
def test_what_is_no_schema_gets_a_sentence(pair, text):
    with pytest.raises(InputError, match=r"it is not JSON|nested too deeply|a schema is an object"):
        json_schema(text).bind(pair.tokenizer, 8192, pair.eos_ids)


@pytest.mark.parametrize(
    "text",
    [
        '{"type": {}, "format": [], "enum": 3}',
        '{"type": "object", "properties": 3, "required": 1}',
        '{"type": "object", "properties": {"a": 1}, "required": [{}], "minProperties": "2"}',
        '{"oneOf": [3, {"required": 3}, {"required": [1], "properties": []}], "allOf": {}, "anyOf": 1}',
        '{"oneOf": [{"type": "object", "required": 3}, {"type": "object"}]}',
        '{"type": "string", "pattern": 3, "patternProperties": [], "propertyNames": {"type": "string", "pattern": 3}}',
        '{"$ref": 3, "items": 3, "prefixItems": {}, "format": {}}',
        '{"properties": {"a": {"enum": {"b": 1}}}, "oneOf": [{"$ref": "#/x/y"}, {"$ref": "#/x/y"}]}',
    ],
)
def test_a_schema_with_values_of_wrong_types_is_refused(pair, text):
    with pytest.raises(InputError, match="the JSON schema cannot be compiled"):
        json_schema(text).bind(pair.tokenizer, 8192, pair.eos_ids)


@pytest.mark.parametrize("pattern", ["^abc$", r"[$^]a[^b$]", r"[\]$]a$", r"\d+\.\w", "", r"[\[a]", r"[a\-\-b]", "[]a]"])
def test_patterns_with_one_meaning_pass(pattern):
    check_pattern(pattern)


@pytest.mark.parametrize("pattern", ["[a&&b]", "x[[a]]", r"[\\[]", "[+--]", "[^a~~b]", "[][a]"])
def test_classes_that_libraries_read_differently_are_refused(pattern):
    with pytest.raises(InputError, match="has two meanings"):
        check_pattern(pattern)
