"""Run by `test_compiled.py` in a process of its own, where no shapes are checked: such checks cannot be compiled."""

import contextlib
import io
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import outrider
from outrider.cli.prepare import prepare
from outrider.core.types import InputError, Request
from outrider.drafters.model import ModelDrafter
from outrider.engine.engine import Engine
from outrider.host.meanwhile import hand_over_by
from outrider.lm.choice import at_hand
from outrider.lm.forwards.compilable import GATHERED, CompilableModel, returning
from outrider.lm.forwards.constants import MappedConstants
from outrider.lm.forwards.runner import Runner
from outrider.lm.head import head_lm
from outrider.lm.hf.open import open_model
from outrider.lm.model import FEW, LanguageModel
from outrider.lm.protocol import Segment
from outrider.lm.target_info import TargetInfo
from outrider.proof.runs import law_of_runs, plain_rows
from outrider.setup import Setup
from tests.host.test_mapped import resident
from tests.world.heads import toy
from tests.world.parts import parts_of

CASES = {
    "a chain": ([[3, 1, 4]], [[5, 9, 2, 6]], None),
    "a shorter chain": ([[3, 1, 4]], [[5, 9]], None),
    "a longer context": ([[3, 1, 4] * 100], [[5, 9, 2, 6, 5]], None),
    "a tree": ([[3, 1, 4]], [[5, 9, 2, 6]], [-1, -1, 0, 1]),
    "two rows": ([[3, 1, 4], [7, 8]], [[5, 9, 2], [6, 5, 3]], None),
    "three ragged rows of trees": (
        [[3, 1], [7, 8, 1, 1], [2] * 70],
        [[5, 9, 2, 1], [6, 5, 3, 3], [1, 2, 3, 4]],
        [-1, 0, -1, 2],
    ),
}


def llama(num_layers: int, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    return LlamaForCausalLM(config).eval()


def said(
    lm: LanguageModel,
    prompts: list[list[int]],
    drafts: list[list[int]],
    parents: list[int] | None,
    taps: tuple[int, ...] = (),
):
    """Logits and taps after drafts behind prompts, and again behind what is left of them when one node is kept."""
    slots = [lm.open() for _ in prompts]
    lm.extend([Segment(slot=s, tokens=torch.tensor(p), logits="none") for s, p in zip(slots, prompts, strict=True)])
    lm.commit({s: range(len(p)) for s, p in zip(slots, prompts, strict=True)})
    found = []
    for _ in range(2):
        above = None if parents is None else np.array(parents)
        pieces = [Segment(slot=s, tokens=torch.tensor(d), parents=above) for s, d in zip(slots, drafts, strict=True)]
        extension = lm.extend(pieces, taps=taps)
        found += [extension.logits, *extension.taps.values()]
        lm.commit({s: [0] for s in slots})
    for slot in slots:
        lm.release(slot)
    return found


def differences(plain: LanguageModel, compiled: LanguageModel, taps: tuple[int, ...]) -> dict[str, float]:
    """By case, the largest difference over the spread of what plain forwards say."""
    found = {}
    for name, case in CASES.items():
        pairs = zip(said(plain, *case, taps), said(compiled, *case, taps), strict=True)
        found[name] = max(float((a - b).abs().max() / (a.max() - a.min())) for a, b in pairs)
    return found


def law(model: LlamaForCausalLM) -> float:
    """How far all runs of a compiled engine are from plain forwards, where three tokens can come."""
    sampling = outrider.Sampling(logit_bias=dict.fromkeys(range(3, 64), -torch.inf))
    request = Request(id="", prompt=(1, 0, 2, 1, 0, 2), max_new_tokens=3, sampling=sampling)
    engine = outrider.load(
        model, drafter="ngram:prompt_lookup_min=1", length="fixed:5", forward="compiled", max_slots=4
    )
    whole = plain_rows(model, request.prompt)

    def row(output: tuple[int, ...]) -> np.ndarray:
        some = np.where(np.arange(64) < 3, whole(output), 0)
        return some / some.sum()

    return law_of_runs(engine, [request], [row]).error


def heads(model: LlamaForCausalLM) -> dict[str, object]:
    """Greedy output with toy heads, compiled and not, in chains and trees of ragged batches, and the libraries."""
    prompts, found = [[3, 1, 4], [5, 9, 2, 6, 5, 3, 5], [8] * 30], {}
    for kind in ("own features", "block"):
        texts, accepted = [], []
        for compile in (False, True):
            target = LanguageModel(model, max_slots=3)
            drafter = toy(kind, TargetInfo.of(target, None), compile=compile)
            for tree, verifier in (("chain", "block"), ("dynamic:width=2,num_nodes=6", "match")):
                parts = parts_of(target, drafter, tree=tree, verifier=verifier)
                engine = Engine(parts, max_slots=3)
                made = engine.generate(prompts, max_new_tokens=24, sampling=outrider.Sampling(temperature=0))
                engine.rest()
                texts.append([out.tokens for out in made])
                accepted.append((tree, sum(out.num_accepted_tokens for out in made)))
        found[kind] = {
            "same": texts[:2] == texts[2:] and accepted[:2] == accepted[2:],
            "most are compiled": 2 * drafter.lm.num_compiled_forwards > drafter.lm.num_forwards,
            **kept_heads(model, kind),
        }
    return found


def kept_heads(model: LlamaForCausalLM, kind: str) -> dict[str, bool]:
    """Who finds a head's libraries: the same head beside the same target, and nobody else."""
    other = llama(2, seed=1)
    around = [TargetInfo.of(LanguageModel(target, max_slots=3), None) for target in (model, other)]
    lms = [toy(kind, each).lm for each in around]
    changed = toy(kind, around[0]).lm
    with torch.no_grad():
        next(changed.module.parameters()).mul_(1.01)
    forwards = [
        head_lm(target, None, lms[0].module, max_slots=3, max_context=around[0].max_context).forward
        for target in ("compiled", "eager")
    ]
    return {
        "found again": all(package.exists() for package in lms[0].packages),
        "not of another target": not any(package.exists() for package in lms[1].packages),
        "not of other weights": not any(package.exists() for package in changed.packages),
        "taken beside a compiled target alone": forwards == ["compiled", "eager"],
    }


def laws_with_a_draft_model(model: LlamaForCausalLM) -> dict[str, float]:
    """The error of the law of runs in which the target is compiled, and of those in which the draft model is."""
    sampling = outrider.Sampling(logit_bias=dict.fromkeys(range(3, 64), -torch.inf))
    request = Request(id="", prompt=(1, 0, 2), max_new_tokens=3, sampling=sampling)
    other, found = llama(1, seed=5), {}
    for name, target, draft in (("target", model, other), ("draft model", other, model)):
        whole = plain_rows(target, request.prompt)

        def row(output: tuple[int, ...], whole: Callable[[tuple[int, ...]], np.ndarray] = whole) -> np.ndarray:
            some = np.where(np.arange(64) < 3, whole(output), 0)
            return some / some.sum()

        for tree, verifier in (("chain", "block"), ("gumbel:branching=2x1", "recursive")):
            engine = outrider.load(
                target,
                drafter=ModelDrafter(
                    lm=LanguageModel(draft, max_slots=4, forward="compiled" if draft is model else "eager")
                ),
                tree=tree,
                verifier=verifier,
                length="fixed:2",
                forward="compiled" if target is model else "eager",
                max_slots=4,
            )
            found[f"{name}, {tree}"] = law_of_runs(engine, [request], [row]).error
    return found


def kept(model: LlamaForCausalLM) -> dict[str, object]:
    """What becomes of the library on disk: who finds it, and who does not."""
    lm = LanguageModel(model, max_slots=2)
    package, folder = lm.package, lm.package.folder
    found: dict[str, object] = {"there": package.exists()}
    before = sorted(path.name for path in folder.parent.iterdir())
    again = LanguageModel(model, max_slots=4)
    again.prepare()
    found["not made again"] = sorted(path.name for path in folder.parent.iterdir()) == before
    found["at hand"] = at_hand(again)
    other = llama(1, seed=1)
    found["of other weights"] = LanguageModel(other).package.exists()
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    counts, names = (threads, threads + 1, threads + 3), sorted(path.name for path in folder.parent.iterdir())
    errors = []
    for count in counts:
        torch.set_num_threads(count)
        same = LanguageModel(model, max_slots=3, forward="compiled")
        errors += differences(LanguageModel(model, max_slots=3), same, ()).values()
    found["for every number of threads"] = max(errors) < 1e-4
    found["none made for other threads"] = sorted(path.name for path in folder.parent.iterdir()) == names
    torch.set_num_threads(threads)
    found["of other taps"] = replace(package, kind=returning((0,))).exists()
    key = (folder / "key.json").read_text()
    (folder / "key.json").write_text(key.replace("machine", "engine"))
    found["with another key"] = LanguageModel(model).package.exists()
    (folder / "key.json").write_text(key)
    return found


def wide(plain: LanguageModel, model: LlamaForCausalLM) -> dict[str, object]:
    """Forwards of many tokens run eager, and all say the same."""
    lm = LanguageModel(model, max_slots=3, forward="compiled")
    lm.narrow, before = 4, lm.num_compiled_forwards
    found = differences(plain, lm, (0, 1))
    return {"differences": found, "some": 0 < lm.num_compiled_forwards - before < lm.num_forwards}


def pages(model: LlamaForCausalLM) -> dict[str, int]:
    """Bytes of the file of weights that are in memory: behind a wide eager forward of a model whose other forwards are
    compiled, and a few of those later.
    """
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        own, text = open_model(folder), torch.arange(6)
        lm = LanguageModel(own, max_slots=3, forward="compiled")
        lm.narrow = 4
        slot = lm.open()
        lm.extend([Segment(slot=slot, tokens=text)])
        found = {"wide": resident(own.lm_head.weight)}
        for _ in range(FEW):
            lm.commit({slot: []})
            lm.extend([Segment(slot=slot, tokens=text[:1])])
        return found | {"later": resident(own.lm_head.weight)}


def unprepared(model: LlamaForCausalLM, taps: tuple[int, ...]) -> dict[str, bool]:
    """Forwards without a library of their taps run eager, and compile none."""
    plain, lm = LanguageModel(model, max_slots=3), LanguageModel(model, max_slots=3, forward="compiled")
    shelf, before = lm.package.folder.parent, lm.num_compiled_forwards
    libraries = sorted(shelf.iterdir())
    return {
        "same": max(differences(plain, lm, taps).values()) < 1e-5,
        "prompts alone are compiled": 3 * (lm.num_compiled_forwards - before) == lm.num_forwards,
        "none made": sorted(shelf.iterdir()) == libraries,
        "compiled is not at hand": "compiled" in at_hand(lm) and "compiled" not in at_hand(lm, taps),
    }


def others_go_on(lm: LanguageModel) -> bool:
    """Whether another thread of Python works while a library runs."""
    ticks, ended, run, interval = [0], threading.Event(), Runner.run, sys.getswitchinterval()
    worked = []

    def tick() -> None:
        while not ended.is_set():
            ticks[0] += 1
            time.sleep(0)

    def watched(runner: Runner, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        before = ticks[0]
        made = run(runner, inputs)
        worked.append(ticks[0] > before)
        return made

    # Nobody loses the lock who does not give it away.
    sys.setswitchinterval(60)
    thread = threading.Thread(target=tick)
    thread.start()
    try:
        with mock.patch.object(Runner, "run", watched):
            for _ in range(1000):
                said(lm, *CASES["a longer context"])
                if any(worked):
                    break
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(interval)
    return any(worked)


def needs_no_lock(lm: LanguageModel) -> bool:
    """Whether each tensor is held twice besides by Python while a library runs: then torch need not take Python's lock
    to let it go.
    """
    run, counts, given = Runner.run, list[int](), list[torch.Tensor]()

    def watched(runner: Runner, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        given[:] = inputs
        return run(runner, inputs)

    hand_over_by(lambda: counts.extend(tensor._use_count() for tensor in given))
    try:
        with mock.patch.object(Runner, "run", watched):
            said(lm, *CASES["a chain"])
    finally:
        hand_over_by(None)
    return bool(counts) and min(counts) >= 3


def failures(lm: LanguageModel) -> list[str]:
    """What a library says that cannot be opened, or that gets too few tensors."""
    found = []
    for attempt in (
        lambda: Runner(lm.package.folder / "none.so", MappedConstants([], Path(), {})),
        lambda: lm.package.open().run([]),
    ):
        try:
            attempt()
        except RuntimeError as error:
            found.append(str(error))
    return found


def experts() -> dict[str, object]:
    """A mixture of experts: few tokens are compiled, many run eager. What the compiler cannot do is refused."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 512}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads)).eval()
    plain, compiled = LanguageModel(model, max_slots=3), LanguageModel(model, max_slots=3, forward="compiled")
    before, found = compiled.num_compiled_forwards, differences(plain, compiled, ())
    refused = ""
    with mock.patch.object(CompilableModel, "widest", None), tempfile.TemporaryDirectory() as folder:
        try:
            with mock.patch.dict(os.environ, {"OUTRIDER_CACHE": folder}):
                LanguageModel(model, forward="compiled")
        except InputError as error:
            refused = str(error)
        left = [path.name for path in Path(folder).rglob("forward.so")]
    return {
        "differences": found,
        "some": 0 < compiled.num_compiled_forwards - before < compiled.num_forwards,
        "widest": compiled.narrow == GATHERED,
        "refused": refused,
        "left": left,
    }


def prepared(model: LlamaForCausalLM) -> dict[str, object]:
    """What `outrider prepare` says of the same weights in a folder, and what a later engine takes."""
    # A measurement beside other tests would be made again.
    with tempfile.TemporaryDirectory() as folder, mock.patch("outrider.lm.choice.crowded", return_value=False):
        model.save_pretrained(folder)
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            prepare(Setup(folder, drafter="ngram", vocab_size=64, threads=1), as_json=True)
        [found] = json.loads(said.getvalue())["models"]
        engine = outrider.load(folder, drafter="ngram", length="fixed:5", vocab_size=64, threads=1)
        choice = engine.parts.target.choice
    return {
        "same folder": found["folder"] == str(LanguageModel(model).package.folder),
        "measured": sorted(found["milliseconds"]),
        "same bound": engine.parts.target.narrow == found["narrow"],
        "remembered": choice.milliseconds == {name: tuple(times) for name, times in found["milliseconds"].items()},
        "taken": engine.parts.target.forward
        == found["forward"]
        == min(found["milliseconds"], key=lambda name: sum(found["milliseconds"][name])),
    }


def main() -> None:
    """Print what all checks find."""
    model = llama(1)
    plain, compiled = LanguageModel(model, max_slots=3), LanguageModel(model, max_slots=3, forward="compiled")
    found: dict[str, object] = {}
    for name, taps in (("without taps", ()), ("with taps", (0, 1))):
        if taps:
            found["unprepared"] = unprepared(model, taps)
            compiled.prepare(taps)
        before = compiled.num_forwards, compiled.num_compiled_forwards
        found[f"differences {name}"] = differences(plain, compiled, taps)
        after = compiled.num_forwards, compiled.num_compiled_forwards
        found[f"all forwards {name} are compiled"] = after[0] - before[0] == after[1] - before[1] > 0
    found["wide"] = wide(plain, model)
    found["pages"] = pages(model)
    found["others go on"] = others_go_on(compiled)
    found["needs no lock"] = needs_no_lock(compiled)
    found["failures"] = failures(compiled)
    found["heads"] = heads(llama(2))
    found["experts"] = experts()
    settings = {"drafter": "ngram:prompt_lookup_min=1", "length": "fixed:5", "max_slots": 2}
    texts = [
        [
            out.tokens
            for out in outrider.load(model, forward=forward, **settings).generate(
                [[3, 1, 4], [5, 9]], max_new_tokens=40, sampling=outrider.Sampling(temperature=0)
            )
        ]
        for forward in ("eager", "compiled")
    ]
    found["greedy output is the same"] = texts[0] == texts[1]
    found["error of the law"] = law(model)
    found["errors with a draft model"] = laws_with_a_draft_model(model)
    found["kept"] = kept(model)
    found["prepared"] = prepared(model)
    print(json.dumps(found))
