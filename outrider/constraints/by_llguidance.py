"""Grammars by llguidance (extra `grammar`): JSON schemas, regular expressions, choices, Lark, GBNF and structural tags.

References:
    https://github.com/guidance-ai/llguidance
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from outrider.constraints.automaton import Matcher
from outrider.constraints.schema import check_pattern, for_llguidance, read_schema
from outrider.constraints.text import GrammarText
from outrider.core.inputs import needs
from outrider.core.sampling import pack
from outrider.core.types import InputError

if TYPE_CHECKING:
    import llguidance

SPACE = r"[\x20\x0A\x0D\x09]"
"""Whitespace of JSON."""
ESCAPES = 'nrbtf\\"'
"""Letters of the escapes in strings. With \\u the name of a property that is not listed may spell a listed one."""
DEAD_END = "NoExtensionBias"
"""llguidance's error where no token may come."""
FREE = '\n%llguidance {"no_forcing": true}\n'
"""What allows every token with which the grammar can go on. Otherwise llguidance allows only one way to split a text
that must come, and that way may hold added tokens, which it then does not accept. The last of such lines counts.
"""


def compiled(
    grammar: GrammarText, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_ids: frozenset[int]
) -> Callable[[], Matcher]:
    """What makes matchers at the beginning of a grammar.

    Raises:
        InputError: llguidance is missing, or does not keep the grammar; the message is the reason alone.
    """
    try:
        import llguidance
    except ImportError as error:
        raise needs("a grammar", "llguidance", "grammar") from error
    reader = _reader(tokenizer, vocab_size, eos_ids)
    limits = llguidance.LLParserLimits(verbose_errors=False)
    texts = [text + FREE for text in _texts(grammar, tokenizer)]
    matchers = [llguidance.LLMatcher(reader, text, log_level=0, limits=limits) for text in texts]
    if matchers[-1].is_error():
        raise InputError(_reason(matchers[-1].get_error()))
    first = next(matcher for matcher in matchers if not matcher.is_error())
    ends = torch.zeros(-(-vocab_size // 32) * 32, dtype=torch.bool)
    ends[sorted(eos_ids)] = True
    packed = pack(ends[None])[0]
    return lambda: LLGuidanceMatcher(inner=first.deep_copy(), eos_ids=eos_ids, ends=packed)


@dataclass(kw_only=True)
class LLGuidanceMatcher:
    """llguidance's matcher. End tokens are handled here: they may be any tokens, several of them, and even text.

    Attributes:
        ends: Packed mask of the end tokens.
    """

    inner: "llguidance.LLMatcher"
    eos_ids: frozenset[int]
    ends: Int[Tensor, " words"]
    ended: bool = False

    def fill(self, row: Int[Tensor, " words"]) -> None:
        from llguidance.numpy import fill_next_token_bitmask

        fill_next_token_bitmask(self.inner, row[None].numpy())
        if self.inner.is_error():
            if self.inner.get_error().startswith(DEAD_END):
                row.zero_()
                return
            raise InputError(f"llguidance cannot go on with the grammar: {_reason(self.inner.get_error())}")
        row &= ~self.ends
        if self.inner.is_accepting():
            row |= self.ends

    def accept(self, token: int) -> bool:
        if token in self.eos_ids:
            self.ended = self.inner.is_accepting()
            return self.ended
        return not self.inner.is_stopped() and self.inner.try_consume_tokens([token]) == 1

    def fork(self) -> "LLGuidanceMatcher":
        return replace(self, inner=self.inner.deep_copy())


def _reason(message: str) -> str:
    """The line of a message that says what is wrong, without the place in rules that nobody wrote."""
    lines = message.strip().splitlines()
    error = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    if "recursion limit exceeded" in error:
        return "it is nested too deeply"
    return re.sub(r'^at 1\(8\): (invalid regex ".*" \(in regex\)|failed to compile JSON schema): ', "", error)


def _texts(grammar: GrammarText, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The grammar in llguidance's dialect of Lark: the preferred form first; the last one must be right."""
    if grammar.kind == "JSON schema":
        return [f"start: %json {json.dumps(form)}" for form in _schemas(grammar.text, grammar.max_whitespace)]
    if grammar.kind == "regex":
        check_pattern(grammar.text)
        from llguidance import regex_to_lark

        # \d and \w are ASCII, as in ECMAScript.
        return [f"start: /{regex_to_lark(grammar.text, 'dw')}/"]
    if grammar.kind == "choice":
        texts = (json.dumps(text, ensure_ascii=False) for text in json.loads(grammar.text))
        return ["start: CHOICE\nCHOICE: " + " | ".join(texts)]
    if grammar.kind == "structural tag":
        return _tagged(grammar, tokenizer)
    return [_lark(grammar)]


def _schemas(text: str, max_whitespace: int | None) -> list[dict[str, Any]]:
    """The forms of a schema, with llguidance's options inside them."""
    options: dict[str, object] = {"lenient": False, "coerce_one_of": False, "json_allowed_escapes": ESCAPES}
    if max_whitespace == 0:
        options |= {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    elif max_whitespace is not None:
        options |= {"whitespace_pattern": f"{SPACE}{{1,{max_whitespace}}}"}
    forms = for_llguidance(read_schema(text))
    if forms[-1] is False:
        raise InputError("the schema false cannot accept any value")
    return [{**(form if isinstance(form, dict) else {}), "x-guidance": options} for form in forms]


def _lark(grammar: GrammarText) -> str:
    """The rules of a grammar in llguidance's dialect of Lark."""
    if grammar.kind == "Lark":
        return grammar.text
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(grammar.text)
    except Exception as error:  # The library raises bare exceptions.
        raise InputError(str(error).strip() or "it is no GBNF") from error


def _tagged(grammar: GrammarText, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Free text with calls in it, as Lark. A special token of the tokenizer is that token, other text is text."""
    tags = json.loads(grammar.text)
    special = {token.content: f"<[{id}]>" for id, token in tokenizer.added_tokens_decoder.items()}
    longest_first = sorted(special, key=len, reverse=True)
    parts = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if special else None

    def spelt(text: str) -> str:
        pieces = parts.split(text) if parts else [text]
        return " ".join(special.get(piece) or json.dumps(piece, ensure_ascii=False) for piece in pieces if piece)

    forms: list[str] = []
    for best in (True, False):
        rules = [f"start: ({' | '.join(f'tag_{i}' for i in range(len(tags['structures'])))})* rest", "rest: TEXT"]
        rules.append("TEXT: /(?s:.*)/")
        for i, tag in enumerate(tags["structures"]):
            trigger = next(each for each in tags["triggers"] if tag["begin"].startswith(each))
            options = _schemas(json.dumps(tag["schema"]), grammar.max_whitespace)
            schema = json.dumps(options[0 if best else -1])
            body = f"{spelt(tag['begin'][len(trigger) :])} %json {schema} {spelt(tag['end'])}"
            if trigger in special:
                rules.append(f"tag_{i}: TEXT {special[trigger]} {body}")
            else:
                rules.append(f"tag_{i}_begin[lazy]: TEXT {json.dumps(trigger, ensure_ascii=False)}")
                rules.append(f"tag_{i}: tag_{i}_begin {body}")
        forms.append("%llguidance {}\n" + "\n".join(rules) + "\n")
    return forms


@lru_cache(maxsize=8)
def _reader(tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_ids: frozenset[int]) -> "llguidance.LLTokenizer":
    """llguidance's view of a vocabulary. Special tokens are not text and match nothing."""
    from llguidance.hf import from_tokenizer

    try:
        return from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=sorted(eos_ids))
    except (ValueError, RuntimeError) as error:
        raise InputError(f"llguidance cannot read this tokenizer: {str(error).strip().splitlines()[0]}") from error
