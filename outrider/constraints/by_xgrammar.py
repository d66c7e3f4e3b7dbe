"""Grammars by xgrammar (extra `xgrammar`): EBNF, and JSON schemas that llguidance does not keep.

References:
    Dong et al. 2024, XGrammar. https://arxiv.org/abs/2411.15100
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from jaxtyping import Int
from torch import Tensor, get_num_threads
from transformers import PreTrainedTokenizerBase

from outrider.constraints.automaton import Matcher
from outrider.constraints.schema import FORMATS, POINTERS, Schema, changed, read_schema, within
from outrider.constraints.text import GrammarText
from outrider.core.inputs import needs, shown
from outrider.core.types import InputError

if TYPE_CHECKING:
    import xgrammar

ORIGIN = re.compile(r"^\[[\d:]+\] \S+:\d+: (Check failed: .* is false: )?")
"""The time and place that xgrammar adds to its messages."""
REPLACED = (
    # A character of a string of given length.
    (r"[^\"\\\r\n]", r"[^\0-\x1f\"\\\r\n]"),
    # A character of a JSON pointer.
    (r"([\0-.]) | ([0-}]) | ([\x7f-", r"([ !#-.]) | ([0-[\]-}]) | ([\x7f-"),
)
"""Parts of xgrammar's rules that let raw control characters, quotes and backslashes into a string, and their mends."""
DROPPED = (
    # The quoted part of an email address, with any character behind a backslash.
    re.compile(r'() \| \("\\\\" "\\"" \w+ "\\\\" "\\""\)'),
    # An escape in the name of a property that is not listed, which may spell a listed one: \u0061 for a.
    re.compile(r'^(\w+_addl_key\w* ::= .*?) \| \("\\\\" basic_escape basic_string_sub\)', re.MULTILINE),
)
"""Parts of xgrammar's rules that are left out; what the group matches stays."""
BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
KEPT: dict[str, tuple[frozenset[str], ...]] = {
    "string": (frozenset({"minLength", "maxLength"}), frozenset({"format"})),
    "integer": (BOUNDS, frozenset({"multipleOf"})),
    "number": (BOUNDS,),
    "boolean": (frozenset(),),
    "null": (frozenset(),),
    "array": (frozenset({"items", "prefixItems", "minItems", "maxItems"}),),
    "object": (frozenset({"properties", "required", "additionalProperties", "minProperties", "maxProperties"}),),
}
"""By type: the keywords that are enforced together. xgrammar ignores others in silence, so they are refused here."""
LARGEST_MULTIPLE = 1024
"""xgrammar ignores a larger `multipleOf`."""
ALONE = ("$ref", "anyOf", "enum", "const")
"""Keywords that are enforced where they stand alone."""
ANNOTATIONS = frozenset({"$schema", "$id", "$comment", "$anchor", "$defs", "definitions", "title", "description"})
ANNOTATIONS |= {"default", "examples", "deprecated", "readOnly", "writeOnly", "contentEncoding", "contentMediaType"}
ANNOTATIONS |= {"contentSchema", "discriminator"}


def compiled(
    grammar: GrammarText, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_ids: frozenset[int]
) -> Callable[[], Matcher]:
    """What makes matchers at the beginning of a grammar.

    Raises:
        InputError: xgrammar is missing, or does not keep the grammar; the message is the reason alone.
    """
    if grammar.kind == "JSON schema":
        schema = changed(read_schema(grammar.text), _plain)
        check_schema(schema)
    try:
        import xgrammar
    except ImportError as error:
        raise needs("this grammar", "xgrammar", "xgrammar") from error
    compiler = _compiler(tokenizer, vocab_size, eos_ids)
    try:
        rules = grammar.text if grammar.kind == "EBNF" else narrowed(schema, grammar.max_whitespace)
        automaton = compiler.compile_grammar(rules)
    except (RuntimeError, UnicodeEncodeError) as error:
        raise InputError(_reason(error)) from error
    ends = sorted(eos_ids)
    return lambda: XGrammarMatcher(inner=xgrammar.GrammarMatcher(automaton, override_stop_tokens=ends))


@dataclass(frozen=True, kw_only=True)
class XGrammarMatcher:
    """xgrammar's matcher."""

    inner: "xgrammar.GrammarMatcher"

    @property
    def ended(self) -> bool:
        return bool(self.inner.is_terminated())

    def fill(self, row: Int[Tensor, " words"]) -> None:
        try:
            self.inner.fill_next_token_bitmask(row[None])
        except RuntimeError as error:
            raise _stopped(error) from error

    def accept(self, token: int) -> bool:
        try:
            return bool(self.inner.accept_token(token))
        except RuntimeError as error:
            raise _stopped(error) from error

    def fork(self) -> "XGrammarMatcher":
        return XGrammarMatcher(inner=self.inner.fork())


def _reason(error: Exception) -> str:
    """The line of a message that says what is wrong."""
    return ORIGIN.sub("", str(error).strip().splitlines()[0])


def _stopped(error: RuntimeError) -> InputError:
    return InputError(f"xgrammar cannot go on with the grammar: {_reason(error)}")


def narrowed(schema: Schema, max_whitespace: int | None = None) -> str:
    """xgrammar's rules for a schema, without the outputs that are no JSON or break the schema."""
    import json

    import xgrammar

    rules = str(
        xgrammar.Grammar.from_json_schema(
            json.dumps(schema), any_whitespace=max_whitespace != 0, max_whitespace_cnt=max_whitespace or None
        )
    )
    for part, mend in REPLACED:
        rules = rules.replace(part, mend)
    for pattern in DROPPED:
        rules = pattern.sub(r"\1", rules)
    return rules


def check_schema(schema: Schema) -> None:
    """Raise InputError unless xgrammar enforces every keyword of the schema.

    Example:
        >>> check_schema({"type": "array", "uniqueItems": True})
        Traceback (most recent call last):
        ...
        outrider.core.inputs.InputError: 'uniqueItems' (at #) is not enforced
    """
    for node, at in within(schema):
        said = node.keys() - ANNOTATIONS
        alone = next((word for word in ALONE if word in said), None)
        if alone is None:
            _check_types(node, said, at)
            continue
        if said - {alone}:
            raise InputError(f"{sorted(said - {alone})[0]!r} (at {at}) is not enforced beside {alone!r}")
        if alone == "$ref" and node[alone] != "#" and not str(node[alone]).startswith("#/"):
            raise InputError(f"'$ref' (at {at}) leads to {node[alone]!r}; it must lead into the schema, as #/$defs/x")


def _check_types(node: Mapping[str, Any], said: set[str], at: str) -> None:
    """Check a schema that is not a reference, a choice or a list of values."""
    named = node.get("type", [])
    types = [str(each) for each in named] if isinstance(named, list) else [str(named)]
    enforced = frozenset[str]().union(*(group for kind in types for group in KEPT.get(kind, ())))
    if rest := sorted(said - {"type"} - enforced):
        raise InputError(f"{rest[0]!r} (at {at}) is not enforced" + ("" if types else "; name the type"))
    multiple = node.get("multipleOf", 1)
    if type(multiple) is not int or not 1 <= multiple <= LARGEST_MULTIPLE:
        raise InputError(f"'multipleOf' (at {at}) is enforced from 1 to {LARGEST_MULTIPLE}, got {shown(multiple)}")
    for kind in types:
        groups = KEPT.get(kind, (frozenset[str](),))
        own = said & frozenset[str]().union(*groups)
        if not any(own <= group for group in groups):
            raise InputError(f"{' and '.join(map(repr, sorted(own)))} (at {at}) are not enforced together")
    properties, required, least = node.get("properties", {}), node.get("required", []), node.get("minProperties", 0)
    if not isinstance(properties, Mapping) or not isinstance(required, list) or not isinstance(least, int):
        raise InputError(f"the keywords of objects (at {at}) have values of wrong types")
    for name in map(str, required):
        if name not in properties:
            raise InputError(f"{name!r} is required (at {at}) and not among the properties; add it to them")
    names_are_given = properties and node.get("additionalProperties", False) is False
    if least > 1 and not names_are_given:
        raise InputError(f"'minProperties' (at {at}): a name may come twice and count once; require properties by name")


def _plain(node: dict[str, Any]) -> dict[str, Any]:
    """The same schema without words that enforce nothing."""
    if node.get("uniqueItems") is False:
        del node["uniqueItems"]
    if isinstance(node.get("format"), str) and node["format"] not in FORMATS | POINTERS:
        del node["format"]
    values = node.get("enum", [node["const"]] if "const" in node else None)
    if node.get("type") == "string" and isinstance(values, list) and all(isinstance(each, str) for each in values):
        del node["type"]
    if isinstance(parts := node.get("allOf"), list) and len(parts) == 1 and isinstance(parts[0], dict):
        inner = parts[0]
        if not inner.keys() & (node.keys() - {"allOf"}) - ANNOTATIONS:
            node = {key: each for key, each in node.items() if key != "allOf"} | inner
    return node


@lru_cache(maxsize=8)
def _compiler(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_ids: frozenset[int]
) -> "xgrammar.GrammarCompiler":
    """xgrammar's compiler. Special tokens are not text and match nothing."""
    import xgrammar

    try:
        read = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=sorted(eos_ids))
    except (ValueError, RuntimeError) as error:
        raise InputError(f"xgrammar cannot read this tokenizer: {str(error).splitlines()[0]}") from error
    special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}.union(eos_ids)
    vocabulary = [""] * vocab_size
    for text, id in tokenizer.get_vocab().items():
        if id < vocab_size and id not in special:
            vocabulary[id] = text
    info = xgrammar.TokenizerInfo.from_vocab_and_metadata(vocabulary, read.dump_metadata())
    return xgrammar.GrammarCompiler(info, max_threads=get_num_threads(), cache_enabled=False)
