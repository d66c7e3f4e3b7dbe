"""Draft models with some of a target's experts, against fresh ones of equal size (UNCURL, Muzio et al. 2024).

`python -m recipes experts --target MOE --data TEXTS --prompts PROMPTS --work DIR --out DIR` prunes the experts of a
mixture-of-experts target, such as `python -m recipes moe_target` makes: it merges them (`uncurl`), or keeps the most
used ones (`frequency`), or those with the largest output (`reap`). Each pruned model drafts for the target, as it is
and after distillation. A model with the same config and random weights gets the same distillation. All are judged on
held-out prompts at temperatures 0 and 1.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated

import torch
import typer
from transformers import PreTrainedConfig, PreTrainedModel

from outrider.bench.evidence import Sums
from outrider.bench.report import Table
from outrider.learning.divergences import divergence
from outrider.lm.hf.open import open_model
from outrider.surgery.experts import METHODS, prune_experts
from outrider.training.distill import Distilled
from recipes import options, trained
from recipes.inquiry.papers import Paper
from recipes.trained import Budget, Contrast, Texts, Way, findings, kept_states, made

UNCURL = Paper(name="Muzio et al. 2024, UNCURL", url="https://arxiv.org/abs/2409.01483")
REAP = Paper(name="Lasby et al. 2025, REAP", url="https://arxiv.org/abs/2510.13999")
HALF, FEWER = "at half of the experts mostly equal or better", "at a quarter of the experts better on some tasks"
"""What UNCURL's paper says of pruned models against models of equal size that were trained from scratch."""
FRESH = "fresh"
CALIBRATION = 65_536
"""Most tokens of the target's answers that decide which experts are kept."""
QUICK = trained.QUICK | {"experts": "4", "num_texts": 8, "length": 44}


def untrained(method: str, count: int) -> str:
    """The name of a pruned model as it is."""
    return f"{method}, {count} experts"


def distilled(method: str, count: int) -> str:
    """The name of a model after distillation."""
    return f"{method}, {count} experts, distilled"


def opened(place: str, counts: Sequence[int]) -> PreTrainedModel:
    """The target in float32. Raises InputError if it has no experts, or so many cannot be kept."""
    target = open_model(place, dtype=torch.float32, device="cpu").requires_grad_(False).eval()
    for count in counts:
        prune_experts(target, [[0, 1]], count, "frequency")
    return target


def fresh(config: PreTrainedConfig, kind: type[PreTrainedModel], seed: int) -> PreTrainedModel:
    """A model with random weights."""
    torch.manual_seed(seed)
    return kind(copy.deepcopy(config)).float()


def ways(
    target: PreTrainedModel, counts: Sequence[int], texts: Texts, budget: Budget
) -> tuple[list[Way], list[Way], dict[str, int]]:
    """The pruned models as they are; all models that are distilled; and their numbers of parameters."""
    batches = budget.batches(texts.answers, kept_states(target, texts.answers))
    needed = 1 + CALIBRATION // max(len(each.tokens) for each in texts.answers)
    calibration = [each.tokens.tolist() for each in texts.answers[:needed]]

    def learnt(name: str, model: Callable[[int], PreTrainedModel]) -> Way:
        def learner(seed: int) -> Distilled:
            return Distilled(model(seed).requires_grad_(True), target, loss=divergence("fkl"))

        return Way(name=name, learner=learner, batches=batches, settings=budget.settings)

    bare, trained, sizes = list[Way](), list[Way](), dict[str, int]()
    for count in counts:
        for method in METHODS:
            pruned = prune_experts(target, calibration, count, method).model

            def copied(_: int, model: PreTrainedModel = pruned) -> PreTrainedModel:
                return copy.deepcopy(model)

            way = learnt(distilled(method, count), copied)
            bare.append(Way(name=untrained(method, count), learner=way.learner))
            trained.append(way)
            sizes[f"{count} experts"] = pruned.num_parameters()

        def random(seed: int, config: PreTrainedConfig = pruned.config) -> PreTrainedModel:
            return fresh(config, type(target), seed)

        trained.append(learnt(distilled(FRESH, count), random))
    return bare, trained, sizes


def contrasts(counts: Sequence[int], before: int) -> list[Contrast]:
    """What the papers say, and what else we compare.

    Args:
        before: Experts of the target.
    """
    found = []
    for count in counts:
        share = f"{count} of {before} experts"
        said = HALF if 2 * count >= before else FEWER
        scratch = f"than a fresh one of equal size, both distilled, {share}"
        merging = f"Merging experts emits more tokens per step than keeping the most used ones, {share}"
        uncurl, frequency, reap, new = (distilled(name, count) for name in ("uncurl", "frequency", "reap", FRESH))
        merged, used = (untrained(name, count) for name in ("uncurl", "frequency"))
        found += [
            Contrast(UNCURL, f"Merged experts emit more tokens per step {scratch}", uncurl, new, published=said),
            Contrast(UNCURL, f"The most used experts emit more tokens per step {scratch}", frequency, new),
            Contrast(REAP, f"The loudest experts emit more tokens per step {scratch}", reap, new),
            Contrast(UNCURL, f"{merging}, distilled", uncurl, frequency, published="better"),
            Contrast(
                REAP,
                f"Keeping the loudest experts emits more tokens per step than merging, {share}, distilled",
                reap,
                uncurl,
                published="better on texts that are generated",
            ),
            Contrast(UNCURL, f"{merging}, not distilled", merged, used, published="better"),
            Contrast(
                UNCURL,
                "Merged experts that are not distilled emit more tokens per step than a distilled fresh model of equal "
                f"size, {share}",
                merged,
                new,
            ),
            Contrast(UNCURL, f"Distillation helps merged experts, {share}", uncurl, merged),
        ]
    return found


def in_order(counts: Sequence[int]) -> list[str]:
    """The names of all drafters, as the table has them."""
    return [
        name
        for count in counts
        for name in (
            *(each for method in METHODS for each in (untrained(method, count), distilled(method, count))),
            distilled(FRESH, count),
        )
    ]


@options.with_fields(
    Budget,
    without=("text_steps", "target", "draft"),
    num_texts=800,
    length=96,
    steps=100,
    learning_rate=1e-3,
    num_prompts=64,
)
def main(
    budget: Budget,
    target: Annotated[str, typer.Option(help="Directory of a target with experts, as `moe_target` writes it.")],
    experts: Annotated[str, typer.Option(help="How many experts are kept in each layer; several with commas.")] = "2,4",
) -> None:
    """Prune, distil and compare."""
    counts = options.whole_numbers("--experts", experts)
    budget = replace(budget, target=target)
    with budget.folder("experts", target=target, experts=experts) as place:
        model = opened(target, counts)
        texts, keep = budget.texts(), budget.own_work / "experts"
        bare, learnt, sizes = ways(model, counts, texts, budget)
        # A pruned model as it is has no seed: it is judged once.
        once = made(place, bare, 1, keep, texts.judge)
        rows = [row | {"seed": seed} for row in once for seed in range(budget.seeds)]
        rows += made(place, learnt, budget.seeds, keep, texts.judge)
        before = getattr(model.config, "num_local_experts", None) or model.config.num_experts
        about = (
            f"A target of {before} experts in each layer. Distillation: {budget.steps} steps of {budget.batch_size} "
            f"rows, {budget.num_tokens:,} tokens of the target's answers, forward KL, {budget.seeds} seeds, each with "
            f"another order of the data. Held-out prompts: {Sums(rows).num_prompts}."
        )
        whole = model.num_parameters()
        lines = [["target", f"{whole:,}", "1.00"], *([n, f"{s:,}", f"{s / whole:.2f}"] for n, s in sizes.items())]
        size = Table(title="Parameters", head=["model", "parameters", "of the target"], lines=lines)
        found = findings(rows, contrasts(counts, before), about, in_order(counts))
        place.finish(replace(found, tables=[*found.tables, size]))
