"""How a model's forwards run on this machine, chosen by a short measurement that is remembered."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from outrider.host import remembered
from outrider.host.cores import Usage, crowded, shares
from outrider.lm.fingerprint import shape_of
from outrider.lm.forwards.forward import BLOCK, FORWARDS, Choice, Forward
from outrider.lm.forwards.packed import worth_packing
from outrider.lm.model import LanguageModel
from outrider.lm.protocol import Segment

CONTEXT = 64
"""Tokens before them."""
REPEATS = 7
PATIENCE = 0.1
"""Seconds after which a kind of forward is not repeated any more."""
WIDE = 48
"""Tokens of a forward on which compiled and eager ones are compared: compiled ones are slow with many tokens."""


def choose(lm: LanguageModel, *, forward: Forward | None, pad_to: int | None, lasting: bool = True) -> Choice:
    """Let a model's forwards run in the fastest way that is at hand, or as they are told to.

    The fastest is the one with the least time for a token and a block together. Compiled forwards are at hand where
    their library is on disk already. In half precision on a CPU, one token and a block may use kernels that round
    differently; then forwards are padded to two columns, if that is of help. Compiled forwards of many tokens, such as
    those of prompts, may be slower than eager ones, which are used then. What is measured is remembered, unless other
    processes took the cores meanwhile.

    Args:
        forward: The kind of forward; None chooses.
        pad_to: Fewest columns of a forward; None chooses.
        lasting: Whether the weights will stay as they are. Otherwise only eager forwards are chosen.
    """
    candidates: list[Forward] = ["eager"]
    if forward is not None or lasting:
        candidates = at_hand(lm) if forward is None else [forward]
    half = lm.device.type == "cpu" and lm.dtype in (torch.bfloat16, torch.float16)
    room = lm.max_context >= CONTEXT + BLOCK
    compiled = "compiled" in candidates and lm.device.type == "cpu"
    settled = len(candidates) == 1 and (pad_to is not None or not half) and not compiled
    if settled or not room:
        return _applied(lm, Choice(forward=candidates[-1], pad_to=pad_to or (2 if half else 1)))
    key = {
        "machine": remembered.machine(lm.device),
        "model": shape_of(lm.model),
        "candidates": candidates,
        "pad_to": pad_to,
    }
    choice = _read(remembered.read("forward", key), candidates)
    if choice is None:
        before = Usage.now()
        choice = _measured(lm, candidates, pad_to, half)
        if not crowded(shares(before, Usage.now()), torch.get_num_threads()):
            remembered.write("forward", key, {**vars(choice), "milliseconds": dict(choice.milliseconds)})
    return _applied(lm, choice)


def at_hand(lm: LanguageModel) -> list[Forward]:
    """The kinds of forward that a model can have here at once, without compiling."""
    extra = {
        "eager": lambda: True,
        "packed": lambda: worth_packing(lm.model),
        "compiled": lambda: lm.device.type == "cpu" and lm.package.exists(),
    }
    return [name for name in FORWARDS if lm.why_not(name) is None and extra[name]()]


def _applied(lm: LanguageModel, choice: Choice) -> Choice:
    lm.run_by(choice.forward)
    lm.pad_to, lm.narrow = choice.pad_to, lm.widest if choice.narrow is None else choice.narrow
    return choice


@torch.inference_mode()
def _measured(lm: LanguageModel, candidates: Sequence[Forward], pad_to: int | None, half: bool) -> Choice:
    found: dict[Forward, tuple[float, float]] = {}
    lm.pad_to = pad_to or 1
    for forward in candidates:
        lm.run_by(forward)
        found[forward] = (_milliseconds(lm, 1), _milliseconds(lm, BLOCK))
    best = min(found, key=lambda name: sum(found[name]))
    narrow = _narrow(lm) if best == "compiled" and lm.device.type == "cpu" else None
    lm.run_by(best)
    if pad_to is None:
        pad_to = _least_padding(lm) if half else 1
    lm.num_forwards = 0
    return Choice(forward=best, pad_to=pad_to, narrow=narrow, milliseconds=found)


def _narrow(lm: LanguageModel) -> int | None:
    """The number of tokens up to which compiled forwards are faster than eager ones; None if they are for all tried."""
    if lm.max_context < CONTEXT + WIDE or lm.widest is not None:
        return lm.widest
    found: dict[Forward, tuple[float, float]] = {}
    for forward in ("eager", "compiled"):
        lm.run_by(forward)
        found[forward] = (_milliseconds(lm, BLOCK), _milliseconds(lm, WIDE))
    gained = max(0.0, found["eager"][0] - found["compiled"][0])
    lost = found["compiled"][1] - found["eager"][1]
    # Between the two numbers of tokens, times are taken for straight lines.
    return None if lost <= 0 else BLOCK + int((WIDE - BLOCK) * gained / (gained + lost))


def _milliseconds(lm: LanguageModel, width: int) -> float:
    """Least time of a forward over some tokens behind a text: what disturbs a measurement makes it longer."""
    slot, tokens = lm.open(), _text(lm, width)
    _read_on(lm, slot, _text(lm, CONTEXT))
    spent: list[float] = []
    while len(spent) < 3 or (len(spent) < REPEATS and sum(spent) < PATIENCE):
        start = time.perf_counter()
        lm.extend([Segment(slot=slot, tokens=tokens)])
        if lm.device.type == "cuda":
            torch.cuda.synchronize(lm.device)
        spent.append(time.perf_counter() - start)
        lm.commit({slot: []})
    lm.release(slot)
    # The first one may make what the others use.
    return 1000 * min(spent[1:])


def _least_padding(lm: LanguageModel) -> int:
    """The fewest columns with which one token rounds as it does in a block; 1 where none of those tried does."""
    for columns in (1, 2):
        lm.pad_to = columns
        if all(torch.equal(_alone(lm, start), _in_a_block(lm, start)) for start in range(3)):
            return columns
    return 1


def _alone(lm: LanguageModel, start: int) -> Float[Tensor, "1 vocab"]:
    """Logits of a token that is fed by itself."""
    slot = lm.open()
    text = _text(lm, CONTEXT + BLOCK, start)
    _read_on(lm, slot, text[:CONTEXT])
    _read_on(lm, slot, text[CONTEXT:-1])
    logits = lm.extend([Segment(slot=slot, tokens=text[-1:])]).logits
    lm.release(slot)
    return logits


def _in_a_block(lm: LanguageModel, start: int) -> Float[Tensor, "1 vocab"]:
    """Logits of the same token as the last of a block."""
    slot = lm.open()
    text = _text(lm, CONTEXT + BLOCK, start)
    _read_on(lm, slot, text[:CONTEXT])
    logits = lm.extend([Segment(slot=slot, tokens=text[CONTEXT:])]).logits[-1:]
    lm.release(slot)
    return logits


def _read_on(lm: LanguageModel, slot: int, tokens: Tensor) -> None:
    # With logits, so that the forward is of the kind that verifies.
    lm.extend([Segment(slot=slot, tokens=tokens, logits="all")])
    lm.commit({slot: range(len(tokens))})


def _text(lm: LanguageModel, count: int, start: int = 0) -> Tensor:
    """Some tokens, spread over the vocabulary."""
    return (torch.arange(start, start + count, device=lm.device) * 7919 + 11) % lm.vocab_size


def _read(kept: Mapping[str, Any] | None, candidates: Sequence[Forward]) -> Choice | None:
    """The choice that was remembered; None if there is none or it makes no sense."""
    match kept:
        case {"forward": str(forward), "pad_to": int(pad_to), "narrow": narrow, "milliseconds": dict(times)} if (
            forward in candidates and pad_to >= 1 and (narrow is None or isinstance(narrow, int))
        ):
            pairs = {name: (float(pair[0]), float(pair[1])) for name, pair in times.items()}
            return Choice(forward=forward, pad_to=pad_to, narrow=narrow, milliseconds=pairs)  # type: ignore[arg-type]
    return None
