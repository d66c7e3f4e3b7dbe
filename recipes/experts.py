"""Draft models with some of a target's experts, against fresh ones of equal size (UNCURL, Muzio et al. 2024).

`python -m recipes experts --target MOE --data TEXTS --prompts PROMPTS --work DIR --out DIR` prunes the experts of a
mixture-of-experts target, such as `python -m recipes moe_target` makes: it merges them (`uncurl`), or keeps the most
used ones (`frequency`), or those with the largest output (`reap`). Each pruned model drafts for the target, as it is
and after distillation. A model with the same config and random weights gets the same distillation. All are judged on
held-out prompts at temperatures 0 and 1.
"""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import PreTrainedConfig, PreTrainedModel

from outrider.bench.claims import Claim, Paper
from outrider.bench.evidence import Row, Sums
from outrider.bench.folder import folder
from outrider.bench.report import Findings, Table
from outrider.host.threads import use_threads
from outrider.learning.divergences import divergence
from outrider.lm.hf.open import open_model
from outrider.surgery.experts import METHODS, prune_experts
from outrider.training.data.batches import Batches
from outrider.training.distill import Distilled
from outrider.training.loop.settings import Settings
from recipes import options
from recipes.trained import TEMPERATURES, Texts, Way, against, efficiencies, kept_states, made, short_run

UNCURL = Paper(name="Muzio et al. 2024, UNCURL", url="https://arxiv.org/abs/2409.01483")
REAP = Paper(name="Lasby et al. 2025, REAP", url="https://arxiv.org/abs/2510.13999")
HALF, FEWER = "at half of the experts mostly equal or better", "at a quarter of the experts better on some tasks"
"""What UNCURL's paper says of pruned models against models of equal size that were trained from scratch."""
FRESH = "fresh"
CALIBRATION = 65_536
"""Most tokens of the target's answers that decide which experts are kept."""
QUICK = {
    "experts": "4",
    "num_texts": 8,
    "steps": 2,
    "num_prompts": 4,
    "length": 44,
    "batch_size": 4,
    "seeds": 1,
}


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
    target: PreTrainedModel, counts: Sequence[int], texts: Texts, settings: Callable[[int], Settings]
) -> tuple[list[Way], list[Way], dict[str, int]]:
    """The pruned models as they are; all models that are distilled; and their numbers of parameters."""
    states = kept_states(target, texts.answers)
    needed = 1 + CALIBRATION // max(len(each.tokens) for each in texts.answers)
    calibration = [each.tokens.tolist() for each in texts.answers[:needed]]

    def learnt(name: str, model: Callable[[int], PreTrainedModel]) -> Way:
        def learner(seed: int) -> Distilled:
            return Distilled(model(seed).requires_grad_(True), target, loss=divergence("fkl"))

        def batches(seed: int) -> Batches:
            told = settings(seed)
            return Batches(
                texts.answers, batch_size=told.batch_size, max_length=told.max_length, seed=seed, captured=states
            )

        return Way(name=name, learner=learner, batches=batches, settings=settings)

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


def claims(sums: Sums, counts: Sequence[int], before: int) -> list[Claim]:
    """What the papers say, and what we find.

    Args:
        before: Experts of the target.
    """
    found = []
    for t in TEMPERATURES:
        for count in counts:
            share = f"{count} of {before} experts"
            said = HALF if 2 * count >= before else FEWER
            scratch = f"than a fresh one of equal size, both distilled, {share}"
            merging = f"Merging experts emits more tokens per step than keeping the most used ones, {share}"
            cases = (
                (UNCURL, f"Merged experts emit more tokens per step {scratch}", "uncurl", FRESH, said),
                (UNCURL, f"The most used experts emit more tokens per step {scratch}", "frequency", FRESH, None),
                (REAP, f"The loudest experts emit more tokens per step {scratch}", "reap", FRESH, None),
                (UNCURL, f"{merging}, distilled", "uncurl", "frequency", "better"),
                (
                    REAP,
                    f"Keeping the loudest experts emits more tokens per step than merging, {share}, distilled",
                    "reap",
                    "uncurl",
                    "better on texts that are generated",
                ),
            )
            for paper, sentence, ours, theirs, published in cases:
                pair = distilled(ours, count), distilled(theirs, count)
                found.append(against(paper, sums, sentence, *pair, t, published=published))
            for ours, theirs, sentence, published in (
                (untrained("uncurl", count), untrained("frequency", count), f"{merging}, not distilled", "better"),
                (
                    untrained("uncurl", count),
                    distilled(FRESH, count),
                    f"Merged experts that are not distilled emit more tokens per step than a distilled fresh model of "
                    f"equal size, {share}",
                    None,
                ),
                (
                    distilled("uncurl", count),
                    untrained("uncurl", count),
                    f"Distillation helps merged experts, {share}",
                    None,
                ),
            ):
                found.append(against(UNCURL, sums, sentence, ours, theirs, t, published=published))
    return found


def findings(rows: Sequence[Row], counts: Sequence[int], before: int, sizes: dict[str, int], whole: int) -> Findings:
    """The tables and the claims."""
    sums = Sums(rows, crossed=True)
    names = [
        name
        for count in counts
        for name in (
            *(each for method in METHODS for each in (untrained(method, count), distilled(method, count))),
            distilled(FRESH, count),
        )
    ]
    lines = [["target", f"{whole:,}", "1.00"], *([n, f"{s:,}", f"{s / whole:.2f}"] for n, s in sizes.items())]
    size = Table(title="Parameters", head=["model", "parameters", "of the target"], lines=lines)
    return Findings(tables=[efficiencies(sums, names, rows), size], claims=claims(sums, counts, before))


def main(
    target: Annotated[str, typer.Option(help="Directory of a target with experts, as `moe_target` writes it.")],
    data: Annotated[Path, typer.Option(help="Texts as JSON lines, plain or gzipped.")],
    work: Annotated[Path, typer.Option(help="Folder of this target's answers and of the drafters.")],
    prompts: options.Prompts,
    out: options.Out = None,
    experts: Annotated[str, typer.Option(help="How many experts are kept in each layer; several with commas.")] = "2,4",
    num_texts: Annotated[int, typer.Option(min=2, help="Texts to learn from.")] = 800,
    length: Annotated[int, typer.Option(min=44, help="Tokens of a text.")] = 96,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of every distillation.")] = 100,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a step.")] = 8,
    learning_rate: Annotated[float, typer.Option(help="Highest rate.")] = 1e-3,
    seeds: options.Seeds = 3,
    num_prompts: options.NumPrompts = 64,
    threads: options.Threads = 1,
) -> None:
    """Prune, distil and compare."""
    use_threads(threads)
    counts = options.whole_numbers("--experts", experts)
    given = {"target": target, "experts": experts, "num_texts": num_texts, "length": length, "steps": steps}
    given |= {"batch_size": batch_size, "learning_rate": learning_rate, "num_prompts": num_prompts, "seeds": seeds}
    with folder(out, "experts", {**given, "out": out}) as place:
        model = opened(target, counts)
        texts = Texts.made(
            work / "texts", data, prompts, num_texts=num_texts, length=length, num_prompts=num_prompts, target=target
        )

        def settings(seed: int) -> Settings:
            return short_run(seed, steps, batch_size, length, learning_rate)

        bare, trained, sizes = ways(model, counts, texts, settings)
        # A pruned model as it is has no seed: it is judged once.
        once = made(place, bare, 1, texts, work / "experts")
        rows = [row | {"seed": seed} for row in once for seed in range(seeds)]
        rows += made(place, trained, seeds, texts, work / "experts")
        before = getattr(model.config, "num_local_experts", None) or model.config.num_experts
        found = findings(rows, counts, before, sizes, model.num_parameters())
        about = (
            f"A target of {before} experts in each layer. Distillation: {steps} steps of {batch_size} rows, "
            f"{steps * batch_size * length:,} tokens of the target's answers, forward KL, {seeds} seeds, each with "
            f"another order of the data. Held-out prompts: {Sums(rows).num_prompts}."
        )
        place.finish(Findings(tables=found.tables, claims=found.claims, text=about))
