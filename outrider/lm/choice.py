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
from outrider.host.cores import BEGAN, CoreUsage, crowded, shares
from outrider.lm.fingerprint import shape_of
from outrider.lm.forwards.compilable import returning
from outrider.lm.forwards.forward import BLOCK, FORWARDS, Forward, ForwardChoice
from outrider.lm.forwards.packed import worth_packing
from outrider.lm.model import LanguageModel
from outrider.lm.protocol import Segment

CONTEXT = 64
"""Tokens before them, where their rounding is compared."""
BEFORE = 16
"""The same where they are timed. A model in half precision may read slowly before its weights are packed."""
REPEATS = 7
READING: tuple[Forward, ...] = ("eager", "replayed")
"""Kinds of forward that read a model's own weights each time, so that these may change."""
IN_HALF, ON_A_GPU = (1, 2), (1, 2, 8, 16)
"""The fewest columns of a forward that are tried, in half precision on a CPU and on a GPU."""
TURNS = 2
"""How often the kinds of forward take turns, so that no disturbed second hides the fastest of them."""
PATIENCE, HURRY = 0.1, 1.0
"""Seconds after which a kind of forward is not repeated a fourth time, and a third time."""
HOPELESS = 4
"""A kind of forward that takes so many times as long as another is not repeated, if it takes longer than `PATIENCE`."""
PLACES = 3
"""Places of a text where roundings are compared."""
WIDE = 48
"""Tokens of a forward on which compiled and eager ones are compared: compiled ones are slow with many tokens."""
log = logging.getLogger("outrider")


def choose(
    lm: LanguageModel,
    *,
    forward: Forward | None,
    pad_to: int | None,
    lasting: bool = True,
    taps: Sequence[int] = (),
    again: bool = False,
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
        again: Whether to measure what earlier processes have measured.
            Otherwise that is done only where other processes took the cores then and do not now.
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
    if settled or lm.max_context < CONTEXT + PLACES * BLOCK:
        return _applied(lm, ForwardChoice(forward=candidates[-1], pad_to=2 if paddings == IN_HALF else paddings[0]))
    key = {
        "machine": remembered.machine(lm.device),
        "model": shape_of(lm.model),
        "candidates": candidates,
        "pad_to": pad_to,
    }
    choice = _read(remembered.read("forward", key), candidates)
    if choice is None or again or (choice.busy and not _crowded(BEGAN)):
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
    for _ in range(TURNS if len(candidates) > 1 else 1):
        for forward in list(milliseconds) or candidates:
            if not _runs_by(lm, forward, alone=len(candidates) == 1):
                continue
            # One copy of the weights at a time.
            lm.drop_others()
            # A kind that runs for the first time is checked in a slot, and there may be a single one.
            slot = lm.open()
            times = (_milliseconds(lm, slot, 1), _milliseconds(lm, slot, BLOCK))
            lm.release(slot)
            # What could not be recorded ran eager.
            if not milliseconds or forward != "replayed" or lm.replays:
                one, block = milliseconds.get(forward, times)
                milliseconds[forward] = min(one, times[0]), min(block, times[1])
    best = min(milliseconds, key=lambda name: sum(milliseconds[name]))
    lm.run_by(best)
    slot = lm.open()
    narrow = _narrow(lm, slot, milliseconds) if best == "compiled" else None
    lm.release(slot)
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


def _narrow(lm: LanguageModel, slot: int, milliseconds: Mapping[Forward, tuple[float, float]]) -> int | None:
    """The number of tokens up to which compiled forwards are faster than eager ones; None if they are for all tried.

    Args:
        slot: For the forwards that are timed.
        milliseconds: What a token and a block take, of the kinds that were timed.
    """
    if lm.max_context < CONTEXT + WIDE or lm.widest is not None:
        return lm.widest
    compiled = _milliseconds(lm, slot, WIDE)
    lm.run_by("eager")
    block = milliseconds["eager"][1] if "eager" in milliseconds else _milliseconds(lm, slot, BLOCK)
    gained = max(0.0, block - milliseconds["compiled"][1])
    lost = compiled - _milliseconds(lm, slot, WIDE, beside=compiled)
    # Between the two numbers of tokens, times are taken for straight lines.
    return None if lost <= 0 else BLOCK + int((WIDE - BLOCK) * gained / (gained + lost))


def _paddings(lm: LanguageModel) -> tuple[int, ...]:
    """The fewest columns of a forward that are tried."""
    if lm.device.type == "cuda":
        return ON_A_GPU
    return IN_HALF if lm.device.type == "cpu" and lm.dtype in (torch.bfloat16, torch.float16) else (1,)


def _milliseconds(lm: LanguageModel, slot: int, width: int, beside: float = float("inf")) -> float:
    """Least time of a forward over some tokens behind a text: what disturbs a measurement makes it longer.

    Args:
        slot: Holds the text; an empty one reads it first.
        beside: What a forward of another kind takes.
    """
    tokens = _text(lm, width)
    if not lm.length(slot):
        _read_on(lm, slot, _text(lm, BEFORE))
    spent: list[float] = []
    while _goes_on(spent, beside / 1000):
        _wait(lm.device)
        start = time.perf_counter()
        lm.extend([Segment(slot=slot, tokens=tokens)])
        _wait(lm.device)
        spent.append(time.perf_counter() - start)
        lm.commit({slot: []})
    # The first one may make what the others use.
    return 1000 * min(spent[1:] or spent)


def _goes_on(spent: Sequence[float], beside: float) -> bool:
    """Whether a forward that took these seconds is repeated, beside one of another kind.

    Example:
        >>> [_goes_on(spent, 0.1) for spent in ([], [0.2], [0.5], [0.8, 0.8], [0.03] * 6, [0.01] * 6, [0.01] * 7)]
        [True, True, False, False, False, True, False]
    """
    if not spent or (len(spent) == 1 and spent[0] <= max(PATIENCE, HOPELESS * beside)):
        return True
    enough = {1: 0.0, 2: HURRY}.get(len(spent), PATIENCE)
    return len(spent) < REPEATS and sum(spent) < enough


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
        if all(torch.equal(alone, in_a_block) for alone, in_a_block in _roundings(lm)):
            return columns
    return paddings[0]


def _roundings(lm: LanguageModel) -> list[tuple[Float[Tensor, "1 vocab"], Float[Tensor, "1 vocab"]]]:
    """Logits of a token that is fed by itself and of the same one as the last of a block, at some places of a text."""
    slot, pairs = lm.open(), []
    text = _text(lm, CONTEXT + PLACES * BLOCK)
    _read_on(lm, slot, text[:CONTEXT])
    for block in text[CONTEXT:].split(BLOCK):
        in_a_block = lm.extend([Segment(slot=slot, tokens=block)]).logits[-1:].clone()
        lm.commit({slot: []})
        _read_on(lm, slot, block[:-1])
        pairs.append((lm.extend([Segment(slot=slot, tokens=block[-1:])]).logits.clone(), in_a_block))
        lm.commit({slot: [0]})
    lm.release(slot)
    return pairs


def _read_on(lm: LanguageModel, slot: int, tokens: Tensor) -> None:
    # With logits, so that the forward is of the kind that verifies.
    lm.extend([Segment(slot=slot, tokens=tokens, logits="all")])
    lm.commit({slot: range(len(tokens))})


def _text(lm: LanguageModel, count: int) -> Tensor:
    """Some tokens, spread over the vocabulary."""
    return (torch.arange(count, device=lm.device) * 7919 + 11) % lm.vocab_size


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
