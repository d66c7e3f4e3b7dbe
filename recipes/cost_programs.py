"""What the fresh processes of the recipe `costs` do. Nothing heavy is imported before a program says so.

`python -m recipes.cost_programs NAME JSON` runs a program with the arguments of a JSON object, and prints a row of
figures as the last line.
"""

import functools
import importlib
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Figures = dict[str, float]
START, TORCH, TRANSFORMERS, OWN = "Python", "import torch", "import transformers", "import other modules"
TOKENIZERS, MODELS, PREPARED, FIRST = "open tokenizers", "open models", "caches and self-checks", "first step"
REST = "other work"
PARTS = (START, TORCH, TRANSFORMERS, OWN, TOKENIZERS, MODELS, PREPARED, FIRST, REST)
"""Parts of a start."""
WRAPPED = (
    ("outrider.lm.hf.open", "open_model", MODELS),
    ("outrider.lm.hf.open", "open_tokenizer", TOKENIZERS),
    ("outrider.lm.open", "as_lm", PREPARED),
    ("outrider.engine.engine", "Engine.add", FIRST),
    ("outrider.engine.engine", "Engine.step", FIRST),
)
"""Functions of Outrider, and the parts to which their time belongs."""
TEXT = "Once upon a time, there was a little fox who"
NEW_TOKENS = 16
FREED = 64
"""Tokens that the context has beyond a long prompt."""


def held(name: str = "VmRSS") -> float:
    """A figure of /proc/self/status in MB (10^6 bytes)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise OSError(f"/proc/self/status has no {name}")


def settled(threads: int) -> None:
    """Torch with so many threads, and transformers without bars."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(threads)


def transformers_memory(*, target: str, draft: str, dtype: str, threads: int) -> Figures:
    """Resident memory of both models in transformers, each generating a few tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    settled(threads)
    imported = held()
    tokenizer = AutoTokenizer.from_pretrained(target)
    models = [AutoModelForCausalLM.from_pretrained(place, dtype=dtype).eval() for place in (target, draft)]
    loaded = held()
    given = tokenizer(TEXT, return_tensors="pt", return_token_type_ids=False)
    for model in models:
        model.generate(**given, do_sample=False, min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS)
    return {"imported": imported, "loaded": loaded, "worked": held()}


def outrider_memory(*, target: str, draft: str, dtype: str, threads: int) -> Figures:
    """The pair in an engine, generating as many tokens with speculation."""
    import outrider

    settled(threads)
    imported = held()
    engine = outrider.load(target, drafter=f"model:path={draft}", length="fixed:4", dtype=dtype)
    loaded, greedy = held(), outrider.Sampling(temperature=0)
    engine.generate([TEXT], max_new_tokens=NEW_TOKENS, sampling=greedy, ignore_eos=True)
    return {"imported": imported, "loaded": loaded, "worked": held()}


def growth(*, target: str, draft: str, dtype: str, threads: int, requests: int, warmup: int) -> Figures:
    """One engine and requests in a row, with prompts of 8 to 128 tokens; the first prompt is the longest."""
    import outrider

    settled(threads)
    engine = outrider.load(target, drafter=f"model:path={draft}", length="fixed:4", dtype=dtype)
    dice, warm = random.Random(0), 0.0
    for i in range(requests):
        length = dice.randint(8, 128) if i else 128
        prompt = [dice.randrange(engine.parts.target.vocab_size) for _ in range(length)]
        sampling = outrider.Sampling(temperature=float(i % 2), seed=i)
        engine.generate([prompt], max_new_tokens=NEW_TOKENS, sampling=sampling, ignore_eos=True)
        if i + 1 == warmup:
            warm = held()
    last = held()
    return {"after the warm-up": warm, "after the last request": last, "growth": last - warm}


def reader(way: str, tokens: int, dtype: str) -> Callable[[Sequence[int]], list[int]]:
    """How `transformers` or `outrider` reads a prompt and says one token: a random Llama of six layers, 256 wide."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import outrider

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=tokens + FREED,
        eos_token_id=None,
        bos_token_id=None,
    )
    model: Any = LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()
    greedy = outrider.Sampling(temperature=0)
    engine = outrider.load(model, drafter="none") if way == "outrider" else None

    def read(prompt: Sequence[int]) -> list[int]:
        if engine is not None:
            # A slot that is still warm would know the prompt.
            engine.rest()
            return engine.generate([list(prompt)], max_new_tokens=1, sampling=greedy)[0].tokens
        ids = torch.tensor([list(prompt)])
        said = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False, pad_token_id=0
        )
        found: list[int] = said[0, len(prompt) :].tolist()
        return found

    return read


def reading(*, way: str, tokens: int, dtype: str, turns: int, threads: int) -> Figures:
    """Seconds until the first new token, and the most memory while the prompt was read less what was held before."""
    settled(threads)
    prompt = [(place * 7919 + 11) % 8192 for place in range(tokens)]
    read, seconds = reader(way, tokens, dtype), list[float]()
    # A few tokens import and allocate what every prompt needs.
    read(prompt[:32])
    before = held()
    read(prompt)
    megabytes = held("VmHWM") - before
    for _ in range(turns):
        began = time.perf_counter()
        read(prompt)
        seconds.append(time.perf_counter() - began)
    return {"seconds": statistics.median(seconds), "megabytes": megabytes}


def wall_and_cpu() -> tuple[float, float]:
    """The clock that all processes share, and the CPU seconds of this process."""
    return time.monotonic(), time.process_time()


class Watch:
    """Seconds of each part of a start. A part inside another counts for itself alone.

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

    @property
    def figures(self) -> Figures:
        """Seconds by clock and part, up to now."""
        with self.part(REST):
            pass
        clocks = {"wall": self.wall, "cpu": self.cpu}
        return {f"{clock}: {part}": spent for clock, own in clocks.items() for part, spent in own.items()}


def imports(watch: Watch) -> None:
    """Import what both ways to start need."""
    with watch.part(TORCH):
        importlib.import_module("torch")
    with watch.part(TRANSFORMERS):
        from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedModel  # noqa: F401


def transformers_start(*, began: float, target: str, prompt: str, threads: int) -> Figures:
    """The parts of a bare script that loads the target and its tokenizer and generates one token."""
    watch = Watch(began)
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
    return watch.figures


def outrider_start(*, began: float, words: Sequence[str], threads: int) -> Figures:
    """The parts of `outrider generate`, up to the end of its output."""
    watch = Watch(began)
    with watch.part(OWN):
        app = importlib.import_module("outrider.cli.app")
        importlib.import_module("outrider.cli.commands")
    imports(watch)
    with watch.part(OWN):
        # These names are replaced before other modules import them.
        for each in WRAPPED:
            watch.wrap(*each)
        importlib.import_module("outrider.cli.generate")
    sys.argv = ["outrider", *words]
    try:
        app.main()
    except SystemExit as ended:
        if ended.code:
            raise
    return watch.figures


PROGRAMS: dict[str, Callable[..., dict[str, Any]]] = {
    each.__name__: each
    for each in (transformers_memory, outrider_memory, growth, reading, transformers_start, outrider_start)
}

if __name__ == "__main__":
    print(f"\n{json.dumps(PROGRAMS[sys.argv[1]](**json.loads(sys.argv[2])))}", flush=True)
    # What Python does at its end is not part of a start.
    os._exit(0)
