"""Every method by name: its class, its paper, its guarantee. The one place where a string becomes an object."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from outrider.drafters.model import ModelPath
from outrider.drafters.ngram import Ngram
from outrider.drafters.none import NoDrafter
from outrider.drafters.suffix import Suffix
from outrider.lengths.fixed import Fixed
from outrider.lengths.heuristic import Heuristic
from outrider.trees.chain import Chain
from outrider.types import InputError
from outrider.verifiers.block import Block
from outrider.verifiers.match import Match
from outrider.verifiers.token import Token

Family = Literal["drafter", "tree", "verifier", "length"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method.

    Attributes:
        make: Its class; the fields of the dataclass are its configuration.
        summary: What it does, in one line.
        source: The paper, with its address.
        guarantee: What it promises when the refusal matrix lets it pass.
    """

    family: Family
    name: str
    make: type
    summary: str
    source: str
    guarantee: Literal["exact law", "lossy"] = "exact law"


LEVIATHAN = "Leviathan et al. 2023, https://arxiv.org/abs/2211.17192"
ROWS = (
    Row(family="drafter", name="none", make=NoDrafter, summary="plain decoding", source="-"),
    Row(
        family="drafter",
        name="ngram",
        make=Ngram,
        summary="continue the longest, most recent match of the context's end",
        source="Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding",
    ),
    Row(
        family="drafter",
        name="suffix",
        make=Suffix,
        summary="continue the longest repeated suffix, by a suffix automaton of context and corpus",
        source="Oliaro et al. 2024, SuffixDecoding, https://arxiv.org/abs/2411.04975",
    ),
    Row(
        family="drafter",
        name="model",
        make=ModelPath,
        summary="a smaller LM over the same vocabulary",
        source=LEVIATHAN,
    ),
    Row(family="tree", name="chain", make=Chain, summary="one child per node", source=LEVIATHAN),
    Row(
        family="verifier",
        name="token",
        make=Token,
        summary="accept token by token with probability min(1, p/q)",
        source=LEVIATHAN,
    ),
    Row(
        family="verifier",
        name="block",
        make=Block,
        summary="accept the block jointly; never fewer tokens than token in expectation",
        source="Sun et al. 2024, https://arxiv.org/abs/2403.10444",
    ),
    Row(
        family="verifier",
        name="match",
        make=Match,
        summary="draw from the target and follow the draft while it agrees",
        source="Li et al. 2024, EAGLE, https://arxiv.org/abs/2401.15077",
    ),
    Row(family="length", name="fixed", make=Fixed, summary="the same length at every step", source=LEVIATHAN),
    Row(
        family="length",
        name="heuristic",
        make=Heuristic,
        summary="longer after full acceptance, shorter after a rejection",
        source="Gante 2023, https://huggingface.co/blog/assisted-generation",
    ),
)


def rows(family: Family) -> dict[str, Row]:
    """The methods of one family by name."""
    return {row.name: row for row in ROWS if row.family == family}


def name_of(component: object) -> str:
    """The catalog name of an object, or its class's name where it is not in the catalog."""
    for row in ROWS:
        if row.make is type(component):
            return row.name
    return type(component).__name__


def make(family: Family, text: str) -> object:
    """The object that `name:key=value,key=value` stands for; a single value without a key is the first field.

    Raises:
        InputError: Unknown name, unknown field or a value that is not of the field's type; lists the real ones.

    Example:
        >>> make("length", "fixed:num_speculative_tokens=3"), make("length", "fixed:3").num_speculative_tokens
        (Fixed(num_speculative_tokens=3), 3)
    """
    name, _, rest = text.partition(":")
    known = rows(family)
    if name not in known:
        raise InputError(_unknown(family, name, known))
    fields = {f.name: f for f in dataclasses.fields(known[name].make) if not f.name.startswith("_")}
    hints = typing.get_type_hints(known[name].make)
    values: dict[str, object] = {}
    for i, item in enumerate(filter(None, rest.split(","))):
        key, equals, value = item.partition("=")
        if not equals and i == 0 and fields:
            key, value = next(iter(fields)), item
        if key not in fields:
            raise InputError(_unknown(f"{family} {name!r} field", key, fields))
        values[key] = _value(f"{family} {name!r} field {key!r}", value, hints[key])
    missing = [
        key
        for key, field in fields.items()
        if key not in values and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise InputError(f"{family} {name!r} needs {', '.join(missing)}, as in {name}:{missing[0]}=...")
    return known[name].make(**values)


def _unknown(what: str, given: str, known: Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(given, names, n=1)
    guess = f"; did you mean {close[0]!r}?" if close else "."
    return f"unknown {what} {given!r}{guess} Available: {', '.join(names) or 'no fields'}"


def _value(what: str, text: str, hint: object) -> object:
    """Read a field's value by its type: an int, float, bool, string, or a list of ints written 4x2x2."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for kind in options:
        if kind is type(None):
            if text.lower() == "none":
                return None
        elif kind is bool:
            if text.lower() in ("true", "false"):
                return text.lower() == "true"
        elif typing.get_origin(kind) is tuple:
            if all(part.isdigit() for part in text.split("x")):
                return tuple(int(part) for part in text.split("x"))
        elif isinstance(kind, type):
            try:
                return kind(text)
            except ValueError:
                continue
    wanted = " or ".join(getattr(kind, "__name__", str(kind)) for kind in options)
    raise InputError(f"{what} must be {wanted}, got {text!r}")
