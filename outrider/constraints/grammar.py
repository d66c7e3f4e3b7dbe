"""Grammars that outputs must follow, by xgrammar (extra `grammar`)."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from outrider.constraints.schema import check_pattern, check_schema
from outrider.core.constraint import Constraint
from outrider.core.types import InputError

if TYPE_CHECKING:
    import xgrammar

CACHE_BYTES = 2**28
"""Most memory of the compiled grammars of one tokenizer."""
ORIGIN = re.compile(r"^\[[\d:]+\] \S+:\d+: (Check failed: .* is false: )?")
"""The time and place that xgrammar adds to its messages."""

__all__ = ["Constraint", "Grammar", "any_json", "ebnf", "json_schema", "regex"]


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """A grammar before it is bound to a tokenizer; the functions of this file make it.

    Attributes:
        kind: What `text` is.
        text: The schema, pattern or rules.
        max_whitespace: Of JSON: most whitespace characters between two elements; None is any number.
    """

    kind: Literal["JSON schema", "regex", "EBNF"]
    text: str
    max_whitespace: int | None = None

    def bind(
        self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, eos_ids: frozenset[int]
    ) -> "GrammarConstraint":
        """Compile the grammar for a vocabulary.

        Compiled grammars are cached, so that binding one again costs nothing.

        Args:
            vocab_size: Width of the target's logits, which may be padded beyond the tokenizer.
            eos_ids: Tokens that end an output; they are allowed only where the grammar may end.

        Raises:
            InputError: The grammar is wrong, or xgrammar, the tokenizer or an ending token is missing.
        """
        if tokenizer is None:
            raise InputError("a grammar needs the target's tokenizer")
        if not eos_ids:
            raise InputError(
                "a grammar needs an ending token, and this request has none; leave out ignore_eos, or give eos_ids"
            )
        compiler = _compiler(tokenizer, vocab_size, eos_ids)
        try:
            if self.kind == "regex":
                check_pattern(self.text)
                compiled = compiler.compile_regex(self.text)
            elif self.kind == "EBNF":
                compiled = compiler.compile_grammar(self.text)
            else:
                check_schema(self.text)
                compiled = compiler.compile_json_schema(
                    self.text,
                    any_whitespace=self.max_whitespace != 0,
                    max_whitespace_cnt=self.max_whitespace or None,
                )
        except (InputError, RuntimeError, UnicodeEncodeError) as error:
            reason = ORIGIN.sub("", str(error).strip().splitlines()[0])
            raise InputError(f"the {self.kind} cannot be compiled: {reason}") from error
        constraint = GrammarConstraint(
            compiled=compiled,
            eos_ids=eos_ids,
            num_words=-(-vocab_size // 32),
            name=f"the {self.kind} {self.text if len(self.text) <= 60 else self.text[:57] + '...'}",
        )
        constraint.masks(constraint.open(), [0], [-1])
        return constraint


def json_schema(schema: str | Mapping[str, object] | bool, max_whitespace: int | None = None) -> Grammar:
    """JSON that fits a schema, given as text or as a dictionary.

    Args:
        max_whitespace: Most whitespace characters between two elements; None is any number, which small models like to
            go on with for ever; 0 is the form of `json.dumps`.

    Example:
        >>> json_schema({"type": "boolean"}).text
        '{"type": "boolean"}'
    """
    if max_whitespace is not None and max_whitespace < 0:
        raise InputError(f"max_whitespace must be >= 0, got {max_whitespace}")
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
    except (TypeError, ValueError) as error:
        raise InputError(f"the schema cannot be written as JSON: {error}") from error
    return Grammar(kind="JSON schema", text=text, max_whitespace=max_whitespace)


def any_json(max_whitespace: int | None = None) -> Grammar:
    """JSON of any form."""
    return json_schema("{}", max_whitespace)


def regex(pattern: str) -> Grammar:
    """Text that a regular expression matches from beginning to end."""
    return Grammar(kind="regex", text=pattern)


def ebnf(rules: str) -> Grammar:
    """Text of a context-free grammar, in the notation of llama.cpp's GBNF; it begins with the rule `root`.

    Example:
        >>> answers = ebnf('root ::= "yes" | "no"')
    """
    return Grammar(kind="EBNF", text=rules)


@dataclass(kw_only=True)
class GrammarState:
    """The position of one request in its grammar; changes in place.

    Attributes:
        matcher: xgrammar's automaton; between calls it stands at the newest committed token.
        rows: Masks of this step so far, by the tokens since the newest committed one.
    """

    matcher: "xgrammar.GrammarMatcher"
    rows: dict[tuple[int, ...], Int[Tensor, " words"]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class GrammarConstraint:
    """A compiled grammar.

    The masks of a draft come from one depth-first walk of the automaton, which rolls a token back when it turns round.
    Masks that were computed while the draft grew are reused when it is verified.

    Attributes:
        compiled: xgrammar's grammar, with the vocabulary.
        eos_ids: Tokens that end an output.
        num_words: Words of a mask.
        name: What messages call it.

    References:
        Dong et al. 2024, XGrammar. https://arxiv.org/abs/2411.15100
    """

    compiled: "xgrammar.CompiledGrammar"
    eos_ids: frozenset[int]
    num_words: int
    name: str

    def open(self) -> GrammarState:
        import xgrammar

        return GrammarState(matcher=xgrammar.GrammarMatcher(self.compiled, override_stop_tokens=sorted(self.eos_ids)))

    def masks(self, state: object, tokens: Sequence[int], parents: Sequence[int]) -> Int[Tensor, "nodes words"]:
        """The tokens that may follow each node. Raises InputError if no token may follow the root."""
        own = _state(state)
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(tokens, parents, strict=True):
            paths.append(() if parent < 0 else (*paths[parent], token))
        walked: list[int] = []
        for path in sorted(set(paths).difference(own.rows)):
            shared = next((i for i, (a, b) in enumerate(zip(walked, path, strict=False)) if a != b), len(walked))
            own.matcher.rollback(len(walked) - shared)
            del walked[shared:]
            while len(walked) < len(path) and self._goes_on(own, walked, path[len(walked)]):
                walked.append(path[len(walked)])
            row = self._row(own) if len(walked) == len(path) else self._silence()
            if not row.any():
                if not path:
                    raise InputError(self._stuck())
                # The draft left the grammar's reachable part; plain decoding would not have come here.
                row = self._silence()
            own.rows[path] = row
        own.matcher.rollback(len(walked))
        return torch.stack([own.rows[path] for path in paths])

    def commit(self, state: object, tokens: Sequence[int]) -> None:
        own = _state(state)
        own.rows.clear()
        for token in tokens:
            if not self._accepts(own, token):
                if not own.matcher.is_terminated() and not self._row(own).any():
                    raise InputError(self._stuck())
                raise RuntimeError(f"token {token} was emitted against {self.name}")

    def _goes_on(self, state: GrammarState, walked: Sequence[int], token: int) -> bool:
        """Advance by a token, if the current mask allows it. The mask is checked first, because xgrammar warns about
        special tokens.
        """
        row = state.rows[tuple(walked)]
        return bool(int(row[token // 32]) >> token % 32 & 1) and self._accepts(state, token)

    def _accepts(self, state: GrammarState, token: int) -> bool:
        return not state.matcher.is_terminated() and bool(state.matcher.accept_token(token))

    def _row(self, state: GrammarState) -> Int[Tensor, " words"]:
        """The mask at the matcher's position; all ones behind the end."""
        row = self._silence()
        if not state.matcher.is_terminated():
            state.matcher.fill_next_token_bitmask(row[None])
        return row

    def _silence(self) -> Int[Tensor, " words"]:
        """The mask of a node that no verifier will reach."""
        return torch.full((self.num_words,), -1, dtype=torch.int32)

    def _stuck(self) -> str:
        return f"no token of the vocabulary goes on with {self.name}; it cannot be fulfilled here"


@lru_cache(maxsize=8)
def _compiler(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_ids: frozenset[int]
) -> "xgrammar.GrammarCompiler":
    """xgrammar's compiler, which caches compiled grammars. Special tokens are not text and match nothing."""
    try:
        import xgrammar
    except ImportError as error:
        raise InputError(
            "grammars need xgrammar; `pip install xgrammar` installs it, and so does `pip install outrider[grammar]`"
        ) from error
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
    return xgrammar.GrammarCompiler(info, max_threads=torch.get_num_threads(), cache_limit_bytes=CACHE_BYTES)


def _state(state: object) -> GrammarState:
    if not isinstance(state, GrammarState):
        raise TypeError(f"a grammar keeps a GrammarState, got {type(state).__name__}")
    return state
