"""The runs of the recipe `overhead`: steps beside their bare forwards, and plain decoding beside transformers' own."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import outrider
from outrider.bench.bare import bare, seconds
from outrider.bench.evidence import Row
from outrider.bench.runs import PARTS, law
from outrider.bench.workload import PROMPTS, read_prompts
from outrider.core.types import InputError, Sampling, Step
from outrider.embedded import EMBEDDED_DRAFT, EMBEDDED_TARGET
from outrider.lm.forwards.forward import as_forward
from outrider.lm.hf.open import DTYPES, open_model, open_tokenizer
from outrider.lm.slots.budget import PREFILL_CHUNK
from recipes.stand_in import PARAMETERS, stand_in

GAMMA = 5
GREEDY = Sampling(temperature=0, seed=0)
PAIRS = ("embedded", "stand-in")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured.

    Attributes:
        context: Tokens before the first measured step.
        steps: Steps of each run.
        repeats: Runs of steps, and rounds of decoding.
        contexts: Prompt lengths for plain decoding.
        new_tokens: Tokens of each run of plain decoding.
    """

    out: Path | None = None
    batch_sizes: tuple[int, ...] = (1, 8)
    context: int = 128
    steps: int = 24
    repeats: int = 5
    contexts: tuple[int, ...] = (128, 900)
    new_tokens: int = 48
    parameters: int = PARAMETERS
    dtype: str = "bfloat16"
    threads: int = 2
    forward: str = "eager"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InputError(f"unknown dtype {self.dtype!r}; available: {', '.join(DTYPES)}")
        as_forward(self.forward)
        for name in ("context", "steps", "repeats", "parameters", "threads"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.new_tokens < 2:
            raise InputError(f"new_tokens must be >= 2, got {self.new_tokens}")

    def load(self, model: PreTrainedModel, **parts: Any) -> outrider.Engine:
        """An engine whose forwards run as the plan says."""
        return outrider.load(model, forward=self.forward, **parts)


def prompts_of(texts: Sequence[int], batch: int, size: int) -> list[list[int]]:
    """Different prompts of one length, from one long text."""
    return [[texts[(37 * i + k) % len(texts)] for k in range(size)] for i in range(batch)]


class Stepping:
    """An engine whose batch decodes one step at a time."""

    def __init__(self, engine: outrider.Engine, prompts: Sequence[Sequence[int]], most: int) -> None:
        self.engine = engine
        self.ids = [engine.add(p, max_new_tokens=most, sampling=GREEDY, ignore_eos=True) for p in prompts]
        self.made: list[Step] = []
        while len(self.step()[1]) < len(self.ids):
            pass

    def step(self) -> tuple[float, list[Step]]:
        """Seconds of a step, and its result for each request."""
        made: list[Step] = []
        spent = seconds(lambda: self.engine.step(sink=made.append), self.engine.parts.target.device)
        self.made = made
        return spent, made

    def end(self) -> None:
        """Cancel the requests."""
        for id in self.ids:
            self.engine.cancel(id)
        self.engine.rest()


@dataclass(frozen=True, kw_only=True)
class Models:
    """A target and the models beside it.

    Attributes:
        target: The engines' target.
        bare_target: The target of the bare calls; another copy if the engines are compiled.
        texts: One long text to cut prompts from.
    """

    target: PreTrainedModel
    bare_target: PreTrainedModel
    bare_draft: PreTrainedModel
    texts: Sequence[int]

    @classmethod
    def of(cls, plan: Plan, pair: str) -> "Models":
        """The embedded target, or the stand-in, with the embedded draft model."""
        model = open_model(str(EMBEDDED_TARGET)) if pair == PAIRS[0] else stand_in(plan.parameters)
        draft = open_model(str(EMBEDDED_DRAFT), dtype=plan.dtype)
        model = model.to(draft.device, DTYPES[plan.dtype])
        plain = copy.deepcopy(model) if plan.forward == "compiled" else model
        # All runs continue after end tokens; transformers has no option for that.
        plain.generation_config.eos_token_id = None
        return cls(target=model, bare_target=plain, bare_draft=draft, texts=_texts())


@dataclass(frozen=True, kw_only=True)
class Case:
    """A unit of measurement: steps of a pair at a batch size, or plain decoding behind prompts of a length."""

    pair: str
    batch: int
    context: int | None = None

    @property
    def name(self) -> str:
        """Unique among the cases."""
        what = "steps" if self.context is None else f"decoding behind {self.context}"
        return f"{self.pair}, batch of {self.batch}, {what}"


def profile(plan: Plan, case: Case, models: Models) -> list[Row]:
    """Steps of the engine, each beside its bare forwards and steps of plain decoding; one row per step."""
    batch = case.batch
    own = {"tokenizer": open_tokenizer(str(EMBEDDED_TARGET)), "max_slots": batch}
    drafting = plan.load(models.target, drafter=f"model:path={EMBEDDED_DRAFT}", length=f"fixed:{GAMMA}", **own)
    plains = {f"plain {pad}": plan.load(models.target, drafter="none", pad_to=pad, **own) for pad in (1, 2)}
    prompts = prompts_of(models.texts, batch, plan.context)
    # Requests whose prefill ends early decode while the others prefill.
    most = (plan.steps + 1 + batch * (1 + plan.context // PREFILL_CHUNK)) * (GAMMA + 1) + 1
    middle = torch.tensor(prompts_of(models.texts, batch, plan.context + plan.steps)).to(models.target.device)

    target, draft = (bare(model, middle, plan.forward) for model in (models.bare_target, models.bare_draft))
    rows: list[Row] = []
    for repeat in range(plan.repeats + 1):
        runs = {"step": Stepping(drafting, prompts, most)}
        runs |= {name: Stepping(engine, prompts, most) for name, engine in plains.items()}
        for number in range(plan.steps):
            # After a full acceptance the draft model reads two tokens.
            behind = 2 if any(s.num_accepted_tokens == GAMMA for s in runs["step"].made) else 1
            spent, made = runs["step"].step()
            row: Row = {"pair": case.pair, "batch": batch, "repeat": repeat, "number": number, "step": spent}
            row |= {name: runs[name].step()[0] for name in plains}
            row |= {"target 1": target.forward(1), "target": target.forward(GAMMA + 1)}
            row |= {"draft 1": draft.forward(1), "draft first": draft.forward(behind)}
            row["bare"] = row["target"] + row["draft first"] + (GAMMA - 1) * row["draft 1"]
            row["tokens"] = sum(len(s.tokens) for s in made)
            row |= {f"engine {part}": getattr(made[0].timing, part) for part in PARTS}
            full = len(made) == batch and all(s.num_draft_tokens == GAMMA for s in made)
            if repeat and full:
                rows.append(row)
        for run in runs.values():
            run.end()
    if not rows:
        raise InputError("no step drafted a whole chain for every request; give more --steps")
    return rows


def decode(plan: Plan, case: Case, size: int, models: Models) -> list[Row]:
    """Runs of plain decoding and of transformers in turns, of one token and of many; one row per run."""
    own = {"tokenizer": open_tokenizer(str(EMBEDDED_TARGET)), "max_slots": case.batch}
    plains = {f"plain {pad}": plan.load(models.target, drafter="none", pad_to=pad, **own) for pad in (1, 2)}
    prompts = prompts_of(models.texts, case.batch, size)
    ids = torch.tensor(prompts).to(models.target.device)

    def engine(name: str, count: int) -> None:
        plains[name].generate(prompts, max_new_tokens=count, sampling=GREEDY, ignore_eos=True)
        plains[name].rest()

    def transformers(count: int) -> None:
        given = {**law(0.0), "max_new_tokens": count, "pad_token_id": 0}
        models.bare_target.generate(ids, attention_mask=torch.ones_like(ids), **given)

    calls: dict[str, Callable[[int], None]] = {name: partial(engine, name) for name in plains}
    calls["transformers"] = transformers
    rows: list[Row] = []
    for round_ in range(plan.repeats + 1):
        for count in (1, plan.new_tokens):
            for name, call in calls.items():
                row: Row = {"pair": case.pair, "batch": case.batch, "context": size, "way": name}
                spent = seconds(partial(call, count), models.target.device)
                row |= {"tokens": count * case.batch, "round": round_, "seconds": spent}
                if round_:
                    rows.append(row)
    return rows


def _texts() -> list[int]:
    """One long text from the prompts that ship with the package."""
    tokenizer = open_tokenizer(str(EMBEDDED_TARGET))
    if tokenizer is None:
        raise InputError(f"there is no tokenizer beside {EMBEDDED_TARGET}; put its files there")
    texts = [prompt for _, _, prompt in read_prompts(PROMPTS) if isinstance(prompt, str)]
    return [token for text in texts for token in tokenizer(text)["input_ids"]]
