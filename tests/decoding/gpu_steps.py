"""Engines over tiny models on a GPU that is not there, and what their steps ask of it.

`python -m tests.decoding.gpu_steps` prints the counts of `docs/laboratory/performance.md`.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from outrider import catalog
from outrider.core.constraint import Constraint
from outrider.core.types import Sampling
from outrider.drafters.first import FirstDrafter
from outrider.drafters.protocol import Drafter, Unbound
from outrider.drafters.steering import write_steering
from outrider.drafters.suffix import SuffixDrafter
from outrider.drafters.union import UnionDrafter
from outrider.engine.engine import Engine
from outrider.lm.model import LanguageModel
from outrider.lm.target_info import TargetInfo
from recipes.published_pairs import Size, gemma4
from tests.world.card import DEVICE, Counts, Gpu, gpu
from tests.world.heads import HEADS, LAYERS, OF_ITS_OWN_TARGET, head, write_head
from tests.world.parts import parts_of
from tests.world.steering import steered_drafter
from tests.world.zoo import scrambled

VOCAB = 2048
"""More tokens than any step copies to the host."""
SLOTS = 32
DEPTH = 5
"""Tokens of a chain."""
SCRIPTED = ("gumbel:branching=3x2x1", "traversal")
"""The drawn tree of the table, of 15 nodes, and its verifier."""


def llama(num_layers: int = 3, vocab: int = VOCAB) -> PreTrainedModel:
    """A random Llama; one with fewer layers is the beginning of one with more, so that they often agree."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=None,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = scrambled(LlamaForCausalLM(config)).eval()
    model.model.layers = model.model.layers[:num_layers]
    model.config.num_hidden_layers = num_layers
    return model


def write_drafters(folder: Path) -> None:
    """Checkpoints of the catalog's drafters, each in a folder of its name; of an assistant, its target's too."""
    target = LanguageModel(llama(), max_slots=1)
    for name in HEADS:
        (folder / name).mkdir()
        write_head(name, folder / name, TargetInfo.of(target, None))
    llama(1).save_pretrained(folder / "model")
    steered = steered_drafter(target)
    llama(1).save_pretrained(folder / "steered")
    write_steering(steered.steering, folder / "steered", target.dtype)
    gemma4(Size(), folder / OF_ITS_OWN_TARGET)


def on_card(model: PreTrainedModel, *, max_slots: int = SLOTS) -> LanguageModel:
    """A model on the GPU, as the engine sees it."""
    return LanguageModel(model.to(DEVICE), max_slots=max_slots, max_context=256)


def target_of(name: str, folder: Path) -> LanguageModel:
    """A target that a drafter fits."""
    if name != OF_ITS_OWN_TARGET:
        return on_card(llama())
    return on_card(AutoModelForCausalLM.from_pretrained(folder / name / "target"))


def drafter_of(name: str, target: LanguageModel, folder: Path) -> Drafter:
    """A drafter of the catalog on the GPU, from what `write_drafters` wrote."""
    around = TargetInfo.of(target, None)
    if name in LAYERS:
        return head(name, around)
    if name in ("first", "union"):
        of_several = FirstDrafter if name == "first" else UnionDrafter
        return of_several(drafters=(SuffixDrafter(), drafter_of("model", target, folder)))
    place = folder / name / ("assistant" if name == OF_ITS_OWN_TARGET else "")
    made = catalog.make("drafter", f"{name}:path={place}" if place.exists() else name)
    return made.bind(around) if isinstance(made, Unbound) else made


def engine(
    target: LanguageModel,
    drafter: Drafter,
    *,
    tree: str = "chain",
    verifier: str = "block",
    length: str = f"fixed:{DEPTH}",
) -> Engine:
    """An engine of these parts."""
    parts = parts_of(target, drafter, tree=tree, verifier=verifier, length=catalog.make("length", length))
    return Engine(parts, max_slots=SLOTS)


def steps(
    card: Gpu,
    busy: Engine,
    settings: Sequence[Sampling],
    *,
    constraint: Constraint | None = None,
    logprobs: int | None = None,
    warm: int = 2,
    count: int = 2,
) -> list[Counts]:
    """Counts of some steps of an engine that runs one request for each of these settings, behind `warm` others."""

    def step() -> None:
        for update in busy.step():
            if update.output is not None and update.output.error is not None:
                raise update.output.error

    ids = []
    for i, sampling in enumerate(settings):
        prompt = [*[5 + i, 6, 7, 8] * 4, *range(20, 21 + i % 5), 5 + i, 6]
        given = replace(sampling, seed=i)
        ids.append(busy.add(prompt, max_new_tokens=200, sampling=given, constraint=constraint, logprobs=logprobs))
    try:
        for _ in range(warm):
            step()
        return [card.count(step) for _ in range(count)]
    finally:
        for id in ids:
            busy.cancel(id)
        busy.rest()


def worst(counted: Sequence[Counts], name: str) -> int:
    """The largest of some steps' counts."""
    return max(getattr(counts, name) for counts in counted)


def table(folder: Path) -> list[str]:
    """Lines of a table: uploads, synchronisations and operations outside models, the most of eight steps."""
    greedy, sampled = Sampling(temperature=0.0), Sampling(temperature=1.0)
    lines = ["| step | uploads | synchronisations | operations outside models |", "| --- | --- | --- | --- |"]
    with gpu() as card:
        target = on_card(llama())
        model = drafter_of("model", target, folder)
        wide = on_card(llama(vocab=40960), max_slots=1)
        wide_draft = replace(model, lm=on_card(llama(1, vocab=40960), max_slots=1), vocab_size=None)
        eagle = drafter_of("eagle", target, folder)
        chain = engine(target, model)
        tree = engine(target, model, tree=SCRIPTED[0], verifier=SCRIPTED[1])
        rows: list[tuple[str, Engine, Sampling, tuple[int, ...]]] = [
            ("chain of 5, draft model, T 0", chain, greedy, (1, 8)),
            ("chain of 5, draft model, T 1, block", chain, sampled, (1, 8)),
            ("chain of 5, draft model, T 1, match", engine(target, model, verifier="match"), sampled, (1,)),
            (
                "chain of 5, T 0.6, top_p 0.9, vocabulary 40960",
                engine(wide, wide_draft),
                Sampling(temperature=0.6, top_p=0.9),
                (1,),
            ),
            ("gumbel tree 3x2x1, 15 nodes, traversal, T 0", tree, greedy, (1, 8)),
            ("gumbel tree 3x2x1, 15 nodes, traversal, T 1", tree, sampled, (1, 8)),
            (
                "dynamic tree of 60 nodes, EAGLE, T 0",
                engine(target, eagle, tree="dynamic", verifier="match"),
                greedy,
                (1,),
            ),
            (
                "chain of 5, T 0, repetition penalty 1.1",
                chain,
                Sampling(temperature=0.0, repetition_penalty=1.1),
                (1, 8, 32),
            ),
            ("suffix, goodput, T 0", engine(target, catalog.make("drafter", "suffix"), length="goodput"), greedy, (1,)),
        ]
        for name, busy, sampling, batches in rows:
            each = [steps(card, busy, [sampling] * batch, count=8) for batch in batches]
            cells = [
                " / ".join(str(worst(counted, of)) for counted in each)
                for of in ("uploads", "synchronisations", "operations")
            ]
            title = f"{name}, b{' / b'.join(map(str, batches))}"
            lines.append(f"| {title} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        write_drafters(Path(place))
        print("\n".join(table(Path(place))))
