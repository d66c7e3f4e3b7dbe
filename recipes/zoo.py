"""Every causal LM architecture of transformers as a target, tiny and random: exact, or refused with a reason?

`python -m recipes zoo --out DIR --page FILE` builds one model per architecture (`recipes/tiny.py`) and variant, in
float64 and in its own process, and compares greedy outputs with those of `model.generate`. It uses chains and branching
trees from a draft model that often agrees, for three prompts of different lengths at once and for each prompt alone. It
writes a page and `DIR/rows.jsonl`, and keeps rows that exist already. `--out measurements/architectures --page
docs/laboratory/architectures.md` continues the published page.
"""

import json
import multiprocessing
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import Progress
from transformers import PreTrainedConfig, PreTrainedModel, logging

from outrider.bench.folder import read_rows
from outrider.bench.report import table
from outrider.catalog import make
from outrider.core import files
from outrider.core.types import InputError, Sampling
from outrider.decoding.protocol import Parts
from outrider.decoding.step import StepDecoding
from outrider.drafters.model import ModelDrafter
from outrider.engine.engine import Engine
from outrider.lengths.fixed import FixedLength
from outrider.lm.hf.anatomy import Anatomy
from outrider.lm.hf.support import refusal
from outrider.lm.open import as_lm
from outrider.trees.protocol import Tree
from outrider.verifiers.protocol import Verifier
from recipes.tiny import MODEL_TYPES, VOCAB, Float64, noisy, tiny_config, tiny_model

ROOT = Path(__file__).parent.parent
NUM_TOKENS = 16
SEEDS, VARIOUS = 4, 6
WAYS = {"chains": ("chain", "block"), "trees": ("gumbel:branching=2x2x1", "recursive")}
ROWS = ROOT / "measurements/architectures"
PAGE = """# Every architecture

What `AutoModelForCausalLM` of transformers {transformers} opens, as a target: tiny random models in float64, greedy,
from `python -m recipes zoo`. *chains* and *trees*: outputs with drafts of a draft model are exactly what the model
says when it reads the whole text anew for every token, which is what `model.generate` says where nothing else is
remarked. *batch*: three prompts of different lengths at once say what each says alone. Prompts and outputs are longer
than every window. *also* lists settings that were changed, each by itself, with the same result: the other attention
implementation; windows of 6 tokens on half of the layers; tied weights where they are not, and the reverse; half of
each head turned, with another base; logits and scores scaled and capped.

Of {total} model types, {trees} take chains and trees, {chains} chains alone, and {refused} are refused when they are
loaded, with the sentence below; {untried} could not be built to be tried. {variants} changed settings ran. {wrong} of
all gave anything else than the model itself. What the rows mean for families of models is said in
[models.md](../guide/models.md).

"""
GREEDY = Sampling(temperature=0.0, seed=0)
QUICK = {"only": "llama"}


def prompts() -> list[list[int]]:
    """Three texts of different lengths."""
    random = np.random.default_rng(0)
    return [random.integers(3, VOCAB, size=n).tolist() for n in (13, 5, 21)]


def generated(model: PreTrainedModel, prompt: Sequence[int]) -> list[int]:
    """The output of `model.generate`."""
    ids = torch.tensor([prompt])
    said = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS, eos_token_id=None
    )
    return said[0, len(prompt) :].tolist()


def read(model: PreTrainedModel, prompt: Sequence[int], said: Sequence[int]) -> list[int]:
    """The output of the model if it reads the whole text again for every token, without a cache.

    This equals `said` if every token of `said` is the model's choice.
    """
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *said]]), use_cache=False).logits[0]
        if logits[len(prompt) - 1 : -1].argmax(-1).tolist() == list(said):
            return list(said)
        text = list(prompt)
        for _ in said:
            text.append(int(model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(prompt) :]


def talkative(config: PreTrainedConfig, attention: str | None) -> tuple[PreTrainedModel, list[list[int]]]:
    """A random model with varied outputs, if one of a few seeds gives one, and its outputs by `generate`."""
    best: tuple[PreTrainedModel, list[list[int]]] | None = None
    most = 0
    for seed in range(SEEDS):
        model = tiny_model(config, attention=attention, seed=seed)
        said = [generated(model, prompt) for prompt in prompts()]
        if best is None or len(set(chain(*said))) > most:
            most, best = len(set(chain(*said))), (model, said)
        if most > VARIOUS:
            break
    if best is None:
        raise ValueError("no seed was tried")
    return best


def judge(model_type: str, variant: str = "", **more: Any) -> dict[str, Any]:
    """The result of one architecture: `refused` with a reason, or whether the outputs of each way are right.

    Further settings of the language model can be given.
    """
    torch.manual_seed(0)
    changes = VARIANTS[variant](tiny_config(model_type)) | more
    attention = changes.pop("attn_implementation", None)
    try:
        config = tiny_config(model_type, **changes)
        if model_type in MODEL_TYPES and (reason := refusal(config)) is not None:
            return {"refused": reason}
        model = tiny_model(config, attention=attention)
        generated(model, prompts()[0])
    except Exception as error:
        return {
            "untried": f"transformers itself fails here: {type(error).__name__}: {' '.join(str(error).split())}"[:200]
        }
    try:
        as_lm(model, max_slots=1)
    except InputError as error:
        return {"refused": str(error)}
    model, outputs = talkative(config, attention)
    plain = [read(model, prompt, said) for prompt, said in zip(prompts(), outputs, strict=True)]
    found: dict[str, Any] = {
        "attention": model.config.get_text_config(decoder=True)._attn_implementation,
        "different tokens": len(set(chain(*outputs))),
        "generate reads alike": outputs == plain,
    }
    target = as_lm(model, max_slots=3)
    drafter: ModelDrafter = ModelDrafter(lm=as_lm(noisy(model), max_slots=3))
    for way, (tree, rule) in WAYS.items():
        if way == "trees" and Anatomy.of(model).recurrent:
            continue
        parts = Parts(
            target=target,
            drafter=drafter,
            tree=cast(Tree, make("tree", tree)),
            verifier=cast(Verifier, make("verifier", rule)),
            length=FixedLength(num_speculative_tokens=3),
            decoding=StepDecoding(),
        )
        engine = Engine(parts, max_slots=3)
        together = engine.generate(prompts(), max_new_tokens=NUM_TOKENS, sampling=GREEDY)
        alone = [engine.generate([p], max_new_tokens=NUM_TOKENS, sampling=GREEDY)[0].tokens for p in prompts()]
        engine.rest()
        found[way] = {
            "identical": alone == plain,
            "batch": [one.tokens for one in together] == alone,
            "accepted": sum(one.num_accepted_tokens for one in together),
            "drafted": sum(one.num_draft_tokens for one in together),
        }
    return found


def judged(task: Mapping[str, str]) -> dict[str, Any]:
    """The same, with a crash as a result."""
    torch.set_num_threads(1)
    try:
        with Float64():
            return judge(**task)
    except Exception as error:
        return {"crashed": f"{type(error).__name__}: {error}"[:300], "trace": traceback.format_exc()[-2000:]}


def _send(task: Mapping[str, Any], end: Any) -> None:
    end.send(judged(task))


def apart(task: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """The same in its own process, which may crash or hang."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(task, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(seconds) else {"crashed": f"no answer within {seconds:g} s"}
    except EOFError:
        process.join()
        return {"crashed": f"the process ended with {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def _windows(config: PreTrainedConfig) -> dict[str, Any]:
    """Windows shorter than the text; if layers have types, on half of the layers."""
    text = config.get_text_config(decoder=True)
    if not hasattr(text, "sliding_window"):
        return {}
    mixed: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"] * 2}
    typed = set(getattr(text, "layer_types", None) or ()) <= {"sliding_attention", "full_attention"}
    return {"sliding_window": 6} | (mixed if hasattr(text, "layer_types") and typed else {})


def _tied(config: PreTrainedConfig) -> dict[str, Any]:
    return {"tie_word_embeddings": not config.get_text_config(decoder=True).tie_word_embeddings}


def _rotary(config: PreTrainedConfig) -> dict[str, Any]:
    """Slow rotation of half of each head; per layer type if layer types have their own settings."""
    given = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    new: dict[str, Any] = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    nested = {kind: {**p, **new} for kind, p in given.items() if isinstance(p, dict)}
    return {"rope_parameters": nested or {**given, **new}} if given else {}


def _scaled(config: PreTrainedConfig) -> dict[str, Any]:
    """Logits and scores scaled and capped; attention scores are capped by eager attention only."""
    values = {
        "logit_scale": 0.4,
        "logits_scaling": 2.5,
        "final_logit_softcapping": 2.0,
        "attn_logit_softcapping": 1.5,
        "attention_multiplier": 0.7,
        "residual_multiplier": 0.6,
        "embedding_multiplier": 1.7,
        "lm_head_multiplier": 0.3,
        "logits_soft_cap": 2.0,
    }
    known = config.get_text_config(decoder=True).to_dict()
    eager: dict[str, Any] = {"attn_implementation": "eager"} if "attn_logit_softcapping" in known else {}
    return eager | {name: value for name, value in values.items() if name in known}


VARIANTS: Mapping[str, Callable[[PreTrainedConfig], dict[str, Any]]] = {
    "": lambda config: {},
    "windows": _windows,
    "scaled": _scaled,
    "rotary": _rotary,
    "sdpa": lambda config: {"attn_implementation": "sdpa"},
    "eager": lambda config: {"attn_implementation": "eager"},
    "tied": _tied,
}
"""Changes to an architecture's default settings; none if it has no such setting."""


def right(row: Mapping[str, Any]) -> bool:
    """Whether all outputs equal the model's own outputs, alone and in a batch."""
    ways = [row[way] for way in WAYS if way in row]
    return bool(ways) and all(way["identical"] and way["batch"] for way in ways)


def tasks(rows: Sequence[Mapping[str, Any]], names: Sequence[str], plain: bool) -> Iterator[tuple[str, str]]:
    """The tasks that are left: architectures with default settings, or the variants of those that are right."""
    done = {(row["model_type"], row["variant"]): row for row in rows}
    if plain:
        yield from ((name, "") for name in names if (name, "") not in done)
        return
    bases = {name: done[name, ""] for name in names if (name, "") in done and right(done[name, ""])}
    configs = {name: tiny_config(name) for name in bases}
    for variant, changes in VARIANTS.items():
        for name, base in bases.items():
            if variant not in ("", base["attention"]) and (name, variant) not in done and changes(configs[name]):
                yield name, variant


def _remark(row: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
    """The reason for a refusal, or the further settings that were tried."""
    for found in (row, *others):
        if trouble := found.get("crashed") or ("outputs differ" if "chains" in found and not right(found) else None):
            return f"{found['variant'] or 'as it is'}: {trouble}"
    if "chains" not in row:
        return row.get("refused", row.get("untried", ""))
    tried = [other["variant"] for other in others if right(other)]
    refused = [f"{other['variant']}: {other['refused']}" for other in others if "refused" in other]
    own = "" if row["generate reads alike"] else "`model.generate` differs from the model's own reading of a whole text"
    return "; ".join(filter(None, [own, f"also {', '.join(tried)}" if tried else "", *refused]))


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The page of architectures."""
    lines, counts = [], Counter[str]()
    for row in sorted((row for row in rows if not row["variant"]), key=lambda row: row["model_type"]):
        others = [other for other in rows if other["variant"] and other["model_type"] == row["model_type"]]
        fine = right(row)
        cells = ["yes" if fine and way in row else "no" for way in WAYS]
        lines.append([row["model_type"], *cells, "yes" if fine else "no", _remark(row, others)])
        counts[next(kind for kind in ("trees", "chains", "refused", "untried", "crashed") if kind in row)] += 1
    return PAGE.format(
        total=len(lines),
        transformers=", ".join(sorted({row["transformers"] for row in rows})),
        variants=sum("chains" in row for row in rows if row["variant"]),
        trees=counts["trees"],
        chains=counts["chains"],
        refused=counts["refused"],
        untried=counts["untried"],
        wrong=sum("crashed" in row or ("chains" in row and not right(row)) for row in rows),
    ) + table(("model type", *WAYS, "batch", "remarks"), lines)


def main(
    out: Annotated[Path | None, typer.Option(help="Folder for rows.jsonl; without it nothing is written.")] = None,
    page: Annotated[Path | None, typer.Option(help="The page to write.")] = None,
    only: Annotated[str, typer.Option(help="Model types, separated by commas; all by default.")] = "",
    seconds: Annotated[float, typer.Option(help="Most time per model.")] = 180.0,
) -> None:
    """Judge every architecture, first with default settings, then with others."""
    logging.set_verbosity_error()
    names = only.split(",") if only else MODEL_TYPES
    if unknown := sorted(set(names) - set(MODEL_TYPES)):
        raise InputError(f"unknown model type {unknown[0]!r}; available: {', '.join(MODEL_TYPES)}")
    place = None if out is None else out / "rows.jsonl"
    rows = [] if place is None else read_rows(place)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        # Whole, as the rows may have been packed.
        files.replace(out / "rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    with Progress(console=Console(stderr=True)) as progress:
        for plain in (True, False):
            for name, variant in progress.track(
                list(tasks(rows, names, plain)), description="as they are" if plain else "variants"
            ):
                row = {"model_type": name, "variant": variant, "transformers": version("transformers")}
                row |= apart({"model_type": name, "variant": variant}, seconds)
                rows.append(row)
                if place is not None:
                    with place.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
    if page is None:
        typer.echo(markdown([row for row in rows if row["model_type"] in names]))
    else:
        files.replace(page, markdown(rows).encode())
