"""Positions that short texts do not train: random padding for absolute positions, random gaps for rotary ones.

`python -m recipes positions --data TEXTS --work DIR --out DIR` distils draft models from random weights on texts of 128
tokens: one with a table of absolute positions, with and without random padding (Tao et al. 2023), and one with rotary
positions, with and without random gaps. Their acceptance is measured along longer texts of the target, in buckets of
absolute position.
"""

from collections.abc import Callable, Sequence
from typing import Annotated

import numpy as np
import torch
import typer
from jaxtyping import Float
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

import outrider
from outrider.bench.evidence import IntervalEstimate, Row, Sums
from outrider.bench.report import Findings, Table
from outrider.core.types import InputError, Sampling
from outrider.learning.batch import Document
from outrider.learning.divergences import divergence
from outrider.lm.hf.open import open_config, open_tokenizer
from outrider.training.data.batches import Batches
from outrider.training.data.records import read_documents
from outrider.training.data.regenerate import AnswerOptions, regenerate
from outrider.training.distill import Distilled
from outrider.training.positions import acceptance_by_position, positions_of
from recipes import options, trained
from recipes.inquiry.papers import Paper
from recipes.trained import (
    SHAPE,
    SLOTS,
    TEMPERATURES,
    Budget,
    Contrast,
    Texts,
    Way,
    contrasted,
    fresh_draft,
    kept_states,
    made,
    spread,
)

PADDING = Paper(name="Tao et al. 2023, Random padding", url="https://arxiv.org/abs/2305.04859")
PUBLISHED = "0.2 to 0.8, in F1 of answers"
"""The paper's gain; it is on extractive question answering."""
ABSOLUTE, PADDED = "absolute", "absolute, random padding"
ROTARY, GAPPED = "rotary", "rotary, random gaps"
CONTRASTS = (
    Contrast(
        PADDING,
        "Random padding accepts more behind the trained length, absolute positions",
        PADDED,
        ABSOLUTE,
        published=PUBLISHED,
    ),
    Contrast(PADDING, "Random gaps accept more behind the trained length, rotary positions", GAPPED, ROTARY),
)
QUICK = trained.QUICK | {"long": 140}


def absolute_draft(seed: int, target: str) -> GPT2LMHeadModel:
    """A GPT-2 of the size of the rotary draft model."""
    theirs = open_config(target)
    config = GPT2Config(
        vocab_size=theirs.vocab_size,
        n_positions=theirs.max_position_embeddings,
        n_embd=SHAPE["hidden_size"],
        n_layer=SHAPE["num_hidden_layers"],
        n_head=SHAPE["num_attention_heads"],
        bos_token_id=theirs.bos_token_id,
        eos_token_id=theirs.eos_token_id,
    )
    torch.manual_seed(seed)
    return GPT2LMHeadModel(config)


def ways(target: PreTrainedModel, texts: Texts, budget: Budget) -> list[Way]:
    """Both draft models, as they are and with other positions in training."""
    batches = budget.batches(texts.answers, kept_states(target, texts.answers))
    limit = int(target.config.max_position_embeddings)

    def way(name: str, draft: Callable[[int, str], PreTrainedModel], positions: str) -> Way:
        def learner(seed: int) -> Distilled:
            at = positions_of(positions, limit, seed)
            return Distilled(draft(seed, budget.target), target, loss=divergence("fkl"), positions=at)

        return Way(name=name, learner=learner, batches=batches, settings=budget.settings)

    def rotary(seed: int, of: str) -> PreTrainedModel:
        return fresh_draft(SHAPE, seed, of)

    return [
        way(ABSOLUTE, absolute_draft, "plain"),
        way(PADDED, absolute_draft, "padding"),
        way(ROTARY, rotary, "plain"),
        way(GAPPED, rotary, "gaps"),
    ]


def long_texts(budget: Budget, length: int) -> Sequence[Document]:
    """What the target says to held-out prompts, up to a length; texts that end in their first half are left out."""
    place = budget.own_work / f"long-{length}.jsonl"
    engine = outrider.load(budget.target, drafter="none", max_slots=SLOTS, dtype="float32")
    asked = list(read_documents(budget.prompts, open_tokenizer(budget.target, what="model"), prompts=True))
    generation = AnswerOptions(sampling=Sampling(temperature=1.0, seed=13), max_new_tokens=length)
    regenerate(engine, spread(asked, budget.num_prompts), place, generation)
    found = [each for each in read_documents(place, None, max_tokens=length) if len(each.tokens) > length // 2]
    if not found:
        raise InputError(f"no answer of the target has more than {length // 2} tokens; give more prompts")
    return found


def accepted(learner: Distilled, document: Document, borders: Sequence[int]) -> Row:
    """Sums of acceptance and their numbers of places, by bucket and temperature."""
    batch = Batches([document], batch_size=1, max_length=len(document.tokens), seed=0).batch(0)
    with torch.no_grad():
        found = learner.judged(batch, 1)
    places = np.flatnonzero(batch.learnt[0].numpy())
    row: Row = {}
    for temperature in TEMPERATURES:
        chances = found.agrees if temperature == 0 else np.exp(np.minimum(found.log_ratios, 0))
        buckets = acceptance_by_position(chances[:, 0].astype(float), places, borders)
        for number, bucket in enumerate(buckets):
            name = f"{temperature}_{number}"
            row |= {f"accepted_{name}": bucket.count * (bucket.acceptance or 0.0), f"places_{name}": bucket.count}
    return row


def bucket(sums: Sums, method: str, temperature: int, number: int) -> str:
    """Acceptance in a bucket of positions; a dash if no text reaches it."""
    name = f"{temperature}_{number}"
    if not sums.get(method, f"places_{name}")[0]:
        return "-"
    return IntervalEstimate.of(sums.ratio(method, f"accepted_{name}", f"places_{name}")).text(".3f")


def behind(sums: Sums, method: str, temperature: int) -> Float[np.ndarray, " samples"]:
    """Acceptance behind the trained length."""
    accepted, places = (
        sums.get(method, f"{name}_{temperature}_1") + sums.get(method, f"{name}_{temperature}_2")
        for name in ("accepted", "places")
    )
    return accepted / places


def findings(rows: Sequence[Row], length: int, about: str) -> Findings:
    """Tables and claims."""
    sums = Sums(rows, crossed=True)
    names = (f"below {length}", f"{length} to {2 * length - 1}", f"from {2 * length}")
    tables = [
        Table(
            title=f"Acceptance of the first draft token by absolute position, temperature {t}",
            head=("draft model", *names),
            lines=[[method, *(bucket(sums, method, t, number) for number in range(3))] for method in sums.methods],
        )
        for t in TEMPERATURES
    ]
    claims = contrasted(
        CONTRASTS,
        sums,
        lambda method, t: behind(sums, method, t),
        unit="percentage points of acceptance",
        by=lambda ours, theirs: IntervalEstimate.of(100 * (ours - theirs)),
    )
    return Findings(tables=tables, claims=claims, text=about)


@options.with_fields(Budget, without=("text_steps", "draft"), steps=250, learning_rate=3e-3, num_prompts=60)
def main(
    budget: Budget,
    long: Annotated[int, typer.Option(min=44, help="Tokens of a text that drafters are judged on.")] = 448,
) -> None:
    """Train and compare."""
    with budget.folder("positions", long=long) as place:
        texts, length = budget.texts(), budget.length
        held = long_texts(budget, long)

        def judge(learner: Distilled) -> list[Row]:
            return [
                {"prompt": str(i), "category": text.domain or "", **accepted(learner, text, (length, 2 * length))}
                for i, text in enumerate(held)
            ]

        found = ways(budget.model(), texts, budget)
        rows = made(place, found, budget.seeds, budget.drafters("positions"), judge)
        about = (
            f"Draft models distilled from random weights on {budget.num_tokens:,} tokens of the target's "
            f"answers of {length} tokens, with {budget.seeds} seeds; judged along {Sums(rows).num_prompts} texts of "
            f"the target of up to {long} tokens."
        )
        place.finish(findings(rows, length, about))
