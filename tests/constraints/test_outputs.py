"""What a grammar of a JSON schema lets through is JSON, and fits the schema: 25 outputs of each of 34 schemas."""

import json

import numpy as np
import pytest

import outrider
from outrider import Sampling
from outrider.constraints.automaton import GrammarConstraint
from outrider.constraints.grammar import json_schema
from outrider.core.sampling import unpacked
from outrider.engine.engine import Engine

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

SHORT = {"type": "string", "maxLength": 12}
ROW = {"type": "object", "properties": {"d": SHORT | {"minLength": 1}}, "required": ["d"]}
SCHEMAS = [
    SHORT,
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": ["string", "null"], "maxLength": 3},
    {"type": "string"},
    {"type": "string", "pattern": "^[^a]{1,4}[0-9]?.{0,3}$"},
    {"type": "string", "format": "email"},
    {"type": "number", "minimum": -1.5, "exclusiveMaximum": 20},
    {"type": "integer", "multipleOf": 7},
    {"enum": ["a\nb", '"', "[^0-}]", {"b": [1, None]}, 1.5]},
    {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "number"}, SHORT], "items": {"type": "boolean"}},
    {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "array", "items": {"type": "string", "maxLength": 2}}]},
    {"type": "object", "propertyNames": {"maxLength": 3}, "additionalProperties": {"type": "integer"}},
    {"type": "object", "patternProperties": {"^a[^b]*$": SHORT}},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": SHORT},
    {"type": "object", "properties": {"a": {"type": "null"}, 'a"': SHORT}, "additionalProperties": {"type": "integer"}},
    {
        "type": "object",
        "properties": {"n": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "v": SHORT},
        "required": ["v"],
    },
    {"type": "object", "properties": {"a": SHORT, "b": {"type": "array", "items": ROW}}, "additionalProperties": True},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "date-time"},
    {"type": "array", "items": {"type": "string", "format": "uuid"}, "maxItems": 2},
    {"anyOf": [{"type": "string", "format": "ipv4"}, {"type": "string", "format": "ipv6"}]},
    {"type": "object", "properties": {"at": {"type": "string", "format": "time"}, "for": {"format": "duration"}}},
    {"type": "string", "format": "hostname", "maxLength": 30},
    {"type": "string", "format": "uri"},
    {"type": "string", "pattern": "[ab]{2}", "minLength": 4, "maxLength": 9},
    {"type": "number", "multipleOf": 0.25, "minimum": 0},
    {"allOf": [ROW, {"type": "object", "properties": {"e": SHORT}, "required": ["e"], "maxProperties": 3}]},
    {"oneOf": [{"type": "integer"}, {"type": "object", "properties": {"k": {"const": 1}}, "required": ["k"]}, SHORT]},
    {"type": "object", "patternProperties": {"^x": SHORT}, "properties": {"xa": {"minLength": 2}}, "required": ["xa"]},
    {"type": "object", "propertyNames": {"enum": ["one", "two"]}, "additionalProperties": {"type": "boolean"}},
    {
        "type": "object",
        "properties": {"value": {"type": "integer", "minimum": -9}, "leaves": {"items": {"$ref": "#/$defs/tree"}}},
        "required": ["value", "leaves"],
        "$defs": {"tree": {"anyOf": [{"$ref": "#"}, {"enum": ["leaf", None]}]}},
    },
    {
        "type": "array",
        "items": {"type": "array", "items": {"items": {"type": "boolean"}, "type": "array"}, "maxItems": 2},
        "minItems": 1,
        "maxItems": 3,
    },
    {"type": "object", "additionalProperties": {"type": ["integer", "null"]}, "minProperties": 1, "maxProperties": 2},
]

FORMATS = jsonschema.FormatChecker(["date", "email", "ipv4", "ipv6", "uuid"])
"""Formats that jsonschema checks by itself."""


@pytest.fixture(scope="module")
def pair() -> Engine:
    return outrider.load(tree="gumbel:branching=2x2x1", dtype="float32")


def check(text: str, schema: object) -> None:
    jsonschema.validate(json.loads(text), schema, format_checker=FORMATS)


def drawn(constraint: GrammarConstraint, engine: Engine, dice: np.random.Generator) -> list[int]:
    """Random tokens that the grammar allows; rare characters and those that end something are as likely as the rest."""
    state, tokens = constraint.open(), list[int]()
    texts = {text: id for text, id in engine.tokenizer.get_vocab().items() if len(text) == 1}
    closing = [*(texts[letter] for letter in '"}]@'), *engine.eos_ids]
    # In a vocabulary of bytes, those that are no letters of their own stand behind the Latin letters.
    odd = [id for text, id in texts.items() if text in '\\":u/~' or 0x100 <= ord(text) <= 0x120]
    while len(tokens) < 500:
        row = unpacked(constraint.masks(state, [0], [-1]), engine.parts.target.vocab_size)[0].numpy()
        groups = [np.array(group)[row[group]] for group in (closing, odd, np.arange(len(row)))]
        if len(tokens) > 30 and len(groups[0]):
            groups = groups[:1]
        group = dice.choice([i for i, group in enumerate(groups) if len(group)])
        token = int(dice.choice(groups[group]))
        if token in engine.eos_ids:
            return tokens
        constraint.commit(state, [token])
        tokens.append(token)
    raise AssertionError(f"no end in {engine.tokenizer.decode(tokens)}")


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_twenty_five_drawn_outputs_of_a_schema_parse_and_fit(pair, schema):
    bound, dice = json_schema(schema, 1).bind(pair.tokenizer, 8192, pair.eos_ids), np.random.default_rng(0)
    for _ in range(25):
        check(pair.tokenizer.decode(drawn(bound, pair, dice)), schema)


def test_outputs_of_the_engine_with_a_drafter_and_a_tree_parse_and_fit(pair):
    closing = [pair.encode(f"a{letter}")[-1] for letter in '"}]']
    sampling = [Sampling(seed=s, logit_bias=dict.fromkeys([*closing, *pair.eos_ids], 4.0)) for s in range(len(SCHEMAS))]
    rules = [json_schema(schema, max_whitespace=0) for schema in SCHEMAS]
    outputs = pair.generate(["Once"] * len(SCHEMAS), max_new_tokens=80, sampling=sampling, constraint=rules)
    ended = [(out, schema) for out, schema in zip(outputs, SCHEMAS, strict=True) if out.finish_reason == "stop"]
    assert len(ended) >= 27
    for out, schema in ended:
        check(out.text, schema)
