"""Run by `test_calls.py` in a process of its own, where no shapes are checked: such checks make calls themselves."""

import json
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType

import torch

from outrider.core.types import Sampling
from outrider.engine.engine import Engine
from outrider.lm.protocol import Segment
from tests.world.models import engine, target
from tests.world.package import PACKAGE

GENERATED = "<string>"
"""The file of methods that `dataclass` writes."""


def calls(function: Callable[[], object]) -> Counter[str]:
    """Calls of the package's own functions while `function` runs, by module and name.

    Comprehensions and the values of a generator count as calls if Python makes frames for them. Calls inside torch and
    transformers are not counted.
    """
    counts: Counter[str] = Counter()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event != "call":
            return
        file, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__"))
        if file.startswith(PACKAGE) or (file == GENERATED and module.startswith("outrider.")):
            counts[f"{module}.{frame.f_code.co_qualname}"] += 1

    profiled(note, function)
    return counts


WAITS = ("item", "tolist", "cpu")
"""Methods of a tensor that wait for a GPU to finish."""


def waits(function: Callable[[], object]) -> int:
    """How often the package's own functions call one of `WAITS` while `function` runs."""
    found = 0

    def note(frame: FrameType, event: str, called: object) -> None:
        nonlocal found
        if event == "c_call" and frame.f_code.co_filename.startswith(PACKAGE):
            of_tensor = isinstance(getattr(called, "__self__", None), torch.Tensor)
            found += of_tensor and getattr(called, "__name__", "") in WAITS

    profiled(note, function)
    return found


def profiled(note: Callable[[FrameType, str, object], None], function: Callable[[], object]) -> None:
    """Run a function, and call `note` at each call and return."""
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)


def of_a_forward(requests: int, tokens: int = 5) -> Counter[str]:
    """Calls of one forward of the tiny target over so many tokens of each request."""
    lm = target()
    slots = [lm.open() for _ in range(requests)]

    def extend(count: int) -> None:
        lm.extend([Segment(slot=slot, tokens=torch.arange(3, 3 + count)) for slot in slots])

    # The cache is large enough from here on.
    extend(60)
    lm.commit({slot: range(3) for slot in slots})
    return calls(lambda: extend(tokens))


def running(drafter: str, temperature: float, requests: int, gamma: int = 3) -> Engine:
    """An engine over the tiny pair, with requests that decode."""
    busy = engine(drafter, "block", gamma=gamma)
    for i in range(requests):
        busy.add([5, 6, 7 + i, 5, 6, 7], max_new_tokens=100, sampling=Sampling(temperature=temperature, seed=i))
    for _ in range(3):
        busy.step()
    return busy


def of_a_step(drafter: str, temperature: float, requests: int) -> Counter[str]:
    """Calls of one step: of several steps, the one with most calls."""
    busy = running(drafter, temperature, requests)
    return max([calls(busy.step) for _ in range(6)], key=Counter.total)


def waits_of_steps(temperature: float) -> list[int]:
    """Waits of one step each: for 1 and for 8 requests, with drafts of 2 and of 7 tokens."""
    return [waits(running("model", temperature, count, gamma).step) for count in (1, 8) for gamma in (2, 7)]


CASES: dict[str, Callable[[], Counter[str]]] = {
    "a forward": lambda: of_a_forward(1),
    "a forward of more tokens": lambda: of_a_forward(1, tokens=20),
    "a forward of 8 requests": lambda: of_a_forward(8),
    "a step without drafts": lambda: of_a_step("none", 0.0, 1),
    "a step without drafts of 8 requests": lambda: of_a_step("none", 0.0, 8),
    "a greedy step": lambda: of_a_step("model", 0.0, 1),
    "a greedy step of 8 requests": lambda: of_a_step("model", 0.0, 8),
    "a sampled step": lambda: of_a_step("model", 1.0, 1),
    "a sampled step of 8 requests": lambda: of_a_step("model", 1.0, 8),
}


def main() -> None:
    """Print the counts of all cases."""
    found: dict[str, object] = {name: count() for name, count in CASES.items()}
    print(json.dumps(found | {"waits": [waits_of_steps(temperature) for temperature in (0.0, 1.0)]}))
