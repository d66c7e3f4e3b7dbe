"""Run by the recipe `startup` in a fresh process: how long each part of a start takes. Imports nothing heavy itself."""

import functools
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

START, TORCH, TRANSFORMERS, OWN = "Python", "import torch", "import transformers", "import other modules"
TOKENIZERS, MODELS, PREPARED, FIRST = "open tokenizers", "open models", "caches and self-checks", "first step"
REST = "other work"
PARTS = (START, TORCH, TRANSFORMERS, OWN, TOKENIZERS, MODELS, PREPARED, FIRST, REST)
WRAPPED = (
    ("outrider.lm.hf.open", "open_model", MODELS),
    ("outrider.lm.hf.open", "open_tokenizer", TOKENIZERS),
    ("outrider.lm.open", "as_lm", PREPARED),
    ("outrider.engine.engine", "Engine.add", FIRST),
    ("outrider.engine.engine", "Engine.step", FIRST),
)
"""Functions of Outrider, and the parts to which their time belongs."""


def wall_and_cpu() -> tuple[float, float]:
    """The clock that all processes share, and the CPU seconds of this process."""
    return time.monotonic(), time.process_time()


class Watch:
    """Seconds of each part. A part inside another counts for itself alone.

    Args:
        began: When the process was started, on the clock of `wall_and_cpu`.
        clocks: Returns the seconds of the wall clock, and the CPU seconds of this process.
    """

    def __init__(self, began: float, clocks: Callable[[], tuple[float, float]] = wall_and_cpu) -> None:
        self._clocks = clocks
        self.wall = dict.fromkeys(PARTS, 0.0)
        self.cpu = dict.fromkeys(PARTS, 0.0)
        self._within = [START]
        self._last = (began, 0.0)
        self._lap()
        self._within = [REST]

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the body as this part."""
        self._lap()
        self._within.append(name)
        try:
            yield
        finally:
            self._lap()
            self._within.pop()

    def wrap(self, module: str, name: str, part: str) -> None:
        """Count all calls of a module's function, or of a class's method, as this part."""
        *inner, last = name.split(".")
        owner: Any = functools.reduce(getattr, inner, importlib.import_module(module))
        function: Callable[..., Any] = getattr(owner, last)

        @functools.wraps(function)
        def counted(*args: Any, **named: Any) -> Any:
            with self.part(part):
                return function(*args, **named)

        setattr(owner, last, counted)

    def _lap(self) -> None:
        now = self._clocks()
        self.wall[self._within[-1]] += now[0] - self._last[0]
        self.cpu[self._within[-1]] += now[1] - self._last[1]
        self._last = now


def imports(watch: Watch) -> None:
    """Import what both ways need."""
    with watch.part(TORCH):
        importlib.import_module("torch")
    with watch.part(TRANSFORMERS):
        from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedModel  # noqa: F401


def of_transformers(watch: Watch, target: str, prompt: str) -> None:
    """The parts of the bare script."""
    imports(watch)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with watch.part(MODELS):
        model = AutoModelForCausalLM.from_pretrained(target)
    with watch.part(TOKENIZERS):
        tokenizer = AutoTokenizer.from_pretrained(target)
    with watch.part(FIRST):
        inputs = tokenizer(prompt, return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=1, do_sample=False)
        tokenizer.decode(output[0])


def of_outrider(watch: Watch, arguments: Sequence[str]) -> None:
    """The parts of `outrider generate`, up to the end of its output."""
    with watch.part(OWN):
        app = importlib.import_module("outrider.cli.app")
        importlib.import_module("outrider.cli.commands")
    imports(watch)
    with watch.part(OWN):
        # These names are replaced before other modules import them.
        for each in WRAPPED:
            watch.wrap(*each)
        importlib.import_module("outrider.cli.generate")
    sys.argv = ["outrider", *arguments]
    try:
        app.main()
    except SystemExit as ended:
        if ended.code:
            raise


def go(way: str, began: str, *arguments: str) -> None:
    """Go one way, and print the seconds of its parts as the last line."""
    watch = Watch(float(began))
    if way == "transformers":
        of_transformers(watch, *arguments)
    else:
        of_outrider(watch, arguments)
    with watch.part(REST):
        pass
    print(f"\n{json.dumps({'wall': watch.wall, 'cpu': watch.cpu})}", flush=True)
    # What Python does at its end is not part of a start.
    os._exit(0)


if __name__ == "__main__":
    go(*sys.argv[1:])
