"""Grammars that outputs must follow, by llguidance (extra `grammar`)."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from outrider.constraints import by_llguidance
from outrider.constraints.automaton import GrammarConstraint
from outrider.constraints.text import GrammarText
from outrider.core.constraint import Constraint
from outrider.core.inputs import parse_json
from outrider.core.option import Bounds
from outrider.core.types import InputError

LARK = re.compile(r"^\s*(%llguidance\b|start\s*(\[[^\]]*\])?\s*:(?!:=))", re.MULTILINE)
"""What shows that rules are Lark."""

__all__ = [
    "Constraint",
    "Grammar",
    "any_json",
    "choice",
    "ebnf",
    "json_schema",
    "lark",
    "regex",
    "rules",
    "structural_tag",
]


@dataclass(frozen=True, kw_only=True)
class Grammar(GrammarText):
    """A grammar before it is bound to a tokenizer; the functions of this file make it."""

    def bind(
        self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, eos_ids: frozenset[int]
    ) -> GrammarConstraint:
        """Compile the grammar for a vocabulary.

        Compiled grammars are kept, so that binding one again costs nothing.

        Args:
            vocab_size: Width of the target's logits, which may be padded beyond the tokenizer.
            eos_ids: Tokens that end an output; they are allowed only where the grammar may end.

        Raises:
            InputError: llguidance does not keep the grammar, or it, the tokenizer or an ending token is missing.
        """
        if tokenizer is None:
            raise InputError("a grammar needs the target's tokenizer")
        if not eos_ids:
            raise InputError(
                "a grammar needs an ending token, and this request has none; leave out ignore_eos, or give eos_ids"
            )
        return _bound(self, tokenizer, vocab_size, eos_ids)


@lru_cache(maxsize=64)
def _bound(
    grammar: Grammar, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_ids: frozenset[int]
) -> GrammarConstraint:
    try:
        begin = by_llguidance.compiled(grammar, tokenizer, vocab_size, eos_ids)
    except RecursionError as error:
        raise InputError(f"the {grammar.kind} cannot be compiled: it is nested too deeply") from error
    except InputError as reason:
        raise InputError(f"the {grammar.kind} cannot be compiled: {reason}") from reason
    shown = grammar.text if len(grammar.text) <= 60 else grammar.text[:57] + "..."
    constraint = GrammarConstraint(begin=begin, num_words=-(-vocab_size // 32), name=f"the {grammar.kind} {shown}")
    constraint.masks(constraint.open(), [0], [-1])
    return constraint


def json_schema(schema: str | Mapping[str, object] | bool | type, max_whitespace: int | None = None) -> Grammar:
    """JSON that fits a schema, given as text, as a dictionary or as a pydantic class.

    Args:
        max_whitespace: Most whitespace characters between two elements; None is any number, which small models like to
            go on with for ever; 0 is the form of `json.dumps`.

    Example:
        >>> json_schema({"type": "boolean"}).text
        '{"type": "boolean"}'
    """
    Bounds(least=0).check("max_whitespace", max_whitespace)
    text = schema if isinstance(schema, str) else _json(_plain_schema(schema), "the schema")
    return Grammar(kind="JSON schema", text=text, max_whitespace=max_whitespace)


def any_json(max_whitespace: int | None = None) -> Grammar:
    """JSON of any form."""
    return json_schema("{}", max_whitespace)


def regex(pattern: str) -> Grammar:
    """Text that a regular expression matches from beginning to end."""
    return Grammar(kind="regex", text=pattern)


def choice(texts: Sequence[str]) -> Grammar:
    """One of several texts.

    Example:
        >>> answers = choice(["yes", "no"])
    """
    if isinstance(texts, str) or not texts or not all(isinstance(text, str) for text in texts):
        raise InputError(f"choice takes a list of at least one text, got {texts!r}")
    return Grammar(kind="choice", text=_json(list(texts), "the choice"))


def lark(rules: str) -> Grammar:
    """Text of a context-free grammar in llguidance's dialect of Lark; it begins with the rule `start`.

    Example:
        >>> answers = lark('start: "yes" | "no"')
    """
    return Grammar(kind="Lark", text=rules)


def ebnf(rules: str) -> Grammar:
    """Text of a context-free grammar, in the notation of llama.cpp's GBNF; it begins with the rule `root`.

    Example:
        >>> answers = ebnf('root ::= "yes" | "no"')
    """
    return Grammar(kind="EBNF", text=rules)


def rules(text: str) -> Grammar:
    """Text of a context-free grammar, in Lark if it has a rule `start:`, in GBNF otherwise."""
    return lark(text) if LARK.search(text) else ebnf(text)


def structural_tag(tag: str | Mapping[str, Any], max_whitespace: int | None = None) -> Grammar:
    """Free text with calls in it. Where the text comes to a trigger, one of the structures must follow.

    Args:
        tag: `structures`, a list of `begin`, `schema` and `end`, and `triggers`, a list of texts; the beginning of each
            structure starts with a trigger. As JSON text or as a dictionary.
        max_whitespace: As in `json_schema`.

    Example:
        >>> weather = {"begin": "<call>", "schema": {"type": "object"}, "end": "</call>"}
        >>> calls = structural_tag({"structures": [weather], "triggers": ["<call>"]})
    """
    if isinstance(tag, str):
        tag = parse_json(tag, "the structural tag")
    structures, triggers = (tag.get("structures"), tag.get("triggers")) if isinstance(tag, Mapping) else (None, None)
    if not isinstance(structures, list) or not structures or not isinstance(triggers, list) or not triggers:
        raise InputError("a structural tag has a list of structures and a list of triggers, each of at least one")
    if not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise InputError(f"a trigger is a text of at least one character, got {triggers!r}")
    read = []
    for each in structures:
        if not isinstance(each, Mapping) or not {"begin", "schema", "end"} <= each.keys():
            raise InputError(f"a structure of a structural tag has begin, schema and end, got {each!r}")
        if not any(str(each["begin"]).startswith(trigger) for trigger in triggers):
            raise InputError(f"the structure {each['begin']!r} must start with one of the triggers {triggers!r}")
        schema = _plain_schema(each["schema"])
        read.append({"begin": str(each["begin"]), "schema": schema, "end": str(each["end"])})
    text = _json({"structures": read, "triggers": triggers}, "the structural tag")
    return Grammar(kind="structural tag", text=text, max_whitespace=max_whitespace)


def _plain_schema(schema: Any) -> Any:
    """The schema of a pydantic class; other schemas as they are."""
    return schema.model_json_schema() if hasattr(schema, "model_json_schema") else schema


def _json(value: Any, what: str) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{what} cannot be written as JSON: {error}") from error
