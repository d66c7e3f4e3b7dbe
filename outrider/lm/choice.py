"""How a model's forwards run on this machine, chosen by a short measurement that is remembered."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from outrider.core.inputs import InputError
from outrider.core.ranks import together
from outrider.host import remembered
from outrider.host.cores import CoreUsage, crowded, shares
from outrider.lm.fingerprint import shape_of
from outrider.lm.forwards.compilable import returning
from outrider.lm.forwards.forward import BLOCK, FORWARDS, Forward, ForwardChoice
from outrider.lm.forwards.packed import worth_packing
from outrider.lm.model import LanguageModel
from outrider.lm.protocol import Segment

CONTEXT = 64
"""Tokens before them."""
REPEATS = 7
READING: tuple[Forward, ...] = ("eager", "replayed")
"""Kinds of forward that read a model's own weights each time, so that these may change."""
IN_HALF, ON_A_GPU = (1, 2), (1, 2, 8, 16)
"""The fewest columns of a forward that are tried, in half precision on a CPU and on a GPU."""
PATIENCE = 0.1
"""Seconds after which a kind of forward is not repeated any more."""
WIDE = 48
"""Tokens of a forward on which compiled and eager ones are compared: compiled ones are slow with many tokens."""
_BEGAN = CoreUsage.now()
"""Use of the cores when this module was imported, before any model was read."""
log = logging.getLogger("outrider")


def choose(
    lm: LanguageModel,
    *,
    forward: Forward | None,
    pad_to: int | None,
    lasting: bool = True,
    taps: Sequence[int] = (),
    surely: bool = False,
) -> ForwardChoice:
    """Let a model's forwards run in the fastest way that is at hand, or as they are told to.

    The fastest is the one with the least time for a token and a block together. Compiled forwards are at hand where
    their library is on disk already, replayed ones on a GPU. In half precision on a CPU, and on a GPU, one token and a
    block may use kernels that round differently; then forwards are padded to more columns, if that is of help. Compiled
    forwards of many tokens, such as those of prompts, may be slower than eager ones, which are used then. What is
    measured is remembered. If other processes took the cores meanwhile, it is measured again by the first process that
    finds them free.

    Args:
        forward: The kind of forward; None chooses.
        pad_to: Fewest columns of a forward; None chooses.
        lasting: Whether the weights will stay as they are. Otherwise only forwards that read them each time are chosen.
        taps: The hidden states that forwards will return; compiled ones need a library that does.
        surely: Whether to measure again what was measured while other processes took the cores.
    """
    if together() > 1 and forward is None:
        # Processes that hold one target together would measure different times.
        usual = 2 if _paddings(lm) == IN_HALF else 1
        return _applied(lm, ForwardChoice(forward="eager", pad_to=pad_to or usual))
    if forward is not None:
        candidates = [forward]
    else:
        candidates = at_hand(lm, taps) if lasting else [name for name in READING if lm.why_not(name) is None]
    paddings = _paddings(lm) if pad_to is None else (pad_to,)
    settled = len(candidates) == len(paddings) == 1 and candidates != ["compiled"]
    if settled or lm.max_context < CONTEXT + BLOCK:
        return _applied(lm, ForwardChoice(forward=candidates[-1], pad_to=2 if paddings == IN_HALF else paddings[0]))
    key = {
        "machine": remembered.machine(lm.device),
        "model": shape_of(lm.model),
        "candidates": candidates,
        "pad_to": pad_to,
    }
    choice = _read(remembered.read("forward", key), candidates)
    if choice is None or (choice.busy and (surely or not _crowded(_BEGAN))):
        before = CoreUsage.now()
        measured = _measured(lm, candidates, paddings)
        choice = replace(measured, busy=_crowded(before))
        remembered.write("forward", key, {**vars(choice), "milliseconds": dict(choice.milliseconds)})
    return _applied(lm, choice)


def at_hand(lm: LanguageModel, taps: Sequence[int] = ()) -> list[Forward]:
    """The kinds of forward that a model can have here at once, without compiling, if they return these taps."""
    packages = [replace(lm.package, kind=kind) for kind in {returning(), returning(taps)}]
    extra = {
        "eager": lambda: True,
        "packed": lambda: worth_packing(lm.model),
        "compiled": lambda: lm.device.type == "cpu" and all(package.exists() for package in packages),
        "replayed": lambda: True,
    }
    return [name for name in FORWARDS if lm.why_not(name) is None and extra[name]()]


def _crowded(before: CoreUsage) -> bool:
    """Whether other processes have taken the cores since a moment."""
    return crowded(shares(before, CoreUsage.now()), torch.get_num_threads())


def _applied(lm: LanguageModel, choice: ForwardChoice) -> ForwardChoice:
    lm.run_by(choice.forward)
    lm.drop_others()
    lm.pad_to, lm.narrow = choice.pad_to, lm.widest if choice.narrow is None else choice.narrow
    return choice


@torch.inference_mode()
def _measured(lm: LanguageModel, candidates: Sequence[Forward], paddings: Sequence[int]) -> ForwardChoice:
    milliseconds: dict[Forward, tuple[float, float]] = {}
    lm.pad_to = paddings[0]
    for forward in candidates:
        if not _runs_by(lm, forward, alone=len(candidates) == 1):
            continue
        # One copy of the weights at a time.
        lm.drop_others()
        times = (_milliseconds(lm, 1), _milliseconds(lm, BLOCK))
        # What could not be recorded ran eager.
        if not milliseconds or forward != "replayed" or lm.replays:
            milliseconds[forward] = times
    best = min(milliseconds, key=lambda name: sum(milliseconds[name]))
    narrow = _narrow(lm) if best == "compiled" else None
    lm.run_by(best)
    pad_to = _least_padding(lm, paddings)
    lm.num_forwards = 0
    return ForwardChoice(forward=best, pad_to=pad_to, narrow=narrow, milliseconds=milliseconds)


def _runs_by(lm: LanguageModel, forward: Forward, *, alone: bool) -> bool:
    """Whether a model can run so, tried. Raises InputError if it cannot, and there is no other way."""
    try:
        lm.run_by(forward)
    except InputError as error:
        if alone or forward == "eager":
            raise
        log.warning("%s", error)
        return False
    return True


def _narrow(lm: LanguageModel) -> int | None:
    """The number of tokens up to which compiled forwards are faster than eager ones; None if they are for all tried."""
    if lm.max_context < CONTEXT + WIDE or lm.widest is not None:
        return lm.widest
    milliseconds: dict[Forward, tuple[float, float]] = {}
    for forward in ("eager", "compiled"):
        lm.run_by(forward)
        milliseconds[forward] = (_milliseconds(lm, BLOCK), _milliseconds(lm, WIDE))
    gained = max(0.0, milliseconds["eager"][0] - milliseconds["compiled"][0])
    lost = milliseconds["compiled"][1] - milliseconds["eager"][1]
    # Between the two numbers of tokens, times are taken for straight lines.
    return None if lost <= 0 else BLOCK + int((WIDE - BLOCK) * gained / (gained + lost))


def _paddings(lm: LanguageModel) -> tuple[int, ...]:
    """The fewest columns of a forward that are tried."""
    if lm.device.type == "cuda":
        return ON_A_GPU
    return IN_HALF if lm.device.type == "cpu" and lm.dtype in (torch.bfloat16, torch.float16) else (1,)


def _milliseconds(lm: LanguageModel, width: int) -> float:
    """Least time of a forward over some tokens behind a text: what disturbs a measurement makes it longer."""
    slot, tokens = lm.open(), _text(lm, width)
    _read_on(lm, slot, _text(lm, CONTEXT))
    spent: list[float] = []
    while len(spent) < 3 or (len(spent) < REPEATS and sum(spent) < PATIENCE):
        _wait(lm.device)
        start = time.perf_counter()
        lm.extend([Segment(slot=slot, tokens=tokens)])
        _wait(lm.device)
        spent.append(time.perf_counter() - start)
        lm.commit({slot: []})
    lm.release(slot)
    # The first one may make what the others use.
    return 1000 * min(spent[1:])


def _wait(device: torch.device) -> None:
    """Wait until a GPU has done all that it was asked to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _least_padding(lm: LanguageModel, paddings: Sequence[int]) -> int:
    """The fewest columns with which one token rounds as it does in a block; the first where none of those tried does.
    One that is alone is not tried.
    """
    for columns in paddings if len(paddings) > 1 else ():
        lm.pad_to = columns
        if all(torch.equal(_alone(lm, start), _in_a_block(lm, start)) for start in range(3)):
            return columns
    return paddings[0]


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


def _read(kept: Mapping[str, Any] | None, candidates: Sequence[Forward]) -> ForwardChoice | None:
    """The choice that was remembered; None if there is none or it makes no sense."""
    match kept:
        case {
            "forward": str(forward),
            "pad_to": int(pad_to),
            "narrow": int() | None as narrow,
            "milliseconds": dict(times),
            "busy": bool(busy),
        } if forward in candidates and pad_to >= 1:
            pairs = {name: (float(pair[0]), float(pair[1])) for name, pair in times.items()}
            return ForwardChoice(forward=forward, pad_to=pad_to, narrow=narrow, milliseconds=pairs, busy=busy)  # type: ignore[arg-type]
    return None
