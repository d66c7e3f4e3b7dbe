"""outrider train medusa, eagle, eagle3: train a head that reads the target's hidden states."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from outrider.cli.head_options import Eagle3Options, EagleOptions, HeadOptions, MedusaOptions
from outrider.cli.train_distill import More, run_with
from outrider.cli.train_distill import Task as DistillTask
from outrider.core.types import InputError
from outrider.heads.checkpoint import read_tensors
from outrider.heads.objective import HeadLearner, frequent_tokens
from outrider.learning.batch import Document
from outrider.learning.divergences import HARD, Divergence, divergence
from outrider.learning.learner import Learner
from outrider.lm.hf.open import logit_width
from outrider.training.eagle import Eagle, Eagle3, eagle3_learner, eagle_learner
from outrider.training.loop.settings import Settings
from outrider.training.loop.steps import Trained
from outrider.training.loop.watch import Watch
from outrider.training.medusa import Medusa, medusa_learner
from outrider.training.positions import slot_balanced
from outrider.training.state_heads import StateHeadsLearner
from outrider.trees.fixed import likeliest_topology

KEPT = ("begin", "decay", "draft_vocab", "slot_balanced")
"""Options of every head that must stay the same when a run goes on."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """What the target and the data decide of a learner.

    Attributes:
        loss: The divergence; None: the cross-entropy of the text's own tokens.
        ids: The tokens that a new head can guess, ascending; None: all.
        documents: The texts to learn from.
    """

    target: PreTrainedModel
    loss: Divergence | None
    ids: Int[Tensor, " width"] | None
    device: torch.device
    documents: Sequence[Document]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What was asked for.

    Attributes:
        settings: How to train.
        options: What every head can be told.
        target: The target's directory or hub id.
        sources: Where the texts are.
        out: Folder of the result.
        as_json: Whether the result is printed as JSON.
    """

    settings: Settings
    options: HeadOptions
    target: str
    sources: Sequence[str]
    out: Path
    as_json: bool


def run_medusa(task: Task, medusa: MedusaOptions) -> None:
    """Train Medusa heads, and find the tree that fits their accuracies."""

    def make(given: Given) -> Medusa:
        return medusa_learner(
            given.target,
            loss=given.loss,
            num_heads=task.options.depth,
            num_layers=medusa.layers,
            shared=medusa.shared,
            ids=given.ids,
            begin=task.options.begin,
            decay=task.options.decay,
            seed=task.settings.seed,
            device=given.device,
        )

    about = {"layers": medusa.layers, "shared": medusa.shared}
    run_head(task, "medusa", make, about=about, more=fitted_tree(task, medusa.tree_nodes))


def run_eagle(task: Task, head: EagleOptions) -> None:
    """Train an EAGLE-1 head."""
    if task.options.draft_vocab is not None:
        raise InputError(
            "an EAGLE-1 head guesses with the target's own output layer; draft-vocab is for eagle3 and medusa"
        )

    def make(given: Given) -> Eagle:
        return eagle_learner(
            given.target,
            loss=given.loss,
            decay=task.options.decay,
            begin=task.options.begin,
            seed=task.settings.seed,
            device=given.device,
            **asdict(head),
        )

    run_head(task, "eagle", make, about=asdict(head))


def run_eagle3(task: Task, head: Eagle3Options) -> None:
    """Train an EAGLE-3 head."""
    taps = head.numbers()

    def make(given: Given) -> Eagle3:
        return eagle3_learner(
            given.target,
            loss=given.loss,
            decay=task.options.decay,
            ids=given.ids,
            begin=task.options.begin,
            seed=task.settings.seed,
            device=given.device,
            **{**asdict(head), "taps": taps},
        )

    run_head(task, "eagle3", make, about=asdict(head))


def fitted_tree(task: Task, num_nodes: int) -> More:
    """Finds the tree that fits the accuracies of the heads that a run has kept.

    Args:
        num_nodes: Its draft nodes.
    """

    def tree(learner: Learner, done: Trained, watch: Watch) -> dict[str, Any]:
        made = cast(StateHeadsLearner, learner)
        made.heads.load_state_dict(read_tensors(str(done.out)))
        batches = (batch.to(made.heads.weight.device) for batch in watch.batches())
        accuracies = made.accuracies(batches, greedy=task.options.watch_temperature == 0)
        children = likeliest_topology(accuracies, num_nodes)
        return {"tree": f"fixed:children={'x'.join(map(str, children))},chosen=true"}

    return tree


def run_head(
    task: Task,
    name: str,
    make: Callable[[Given], HeadLearner],
    *,
    about: dict[str, Any],
    more: More | None = None,
) -> None:
    """Train a head, write it and the report, and print what was reached.

    Args:
        name: Its name in the catalog.
        make: Makes the learner.
        about: What a run must keep when it goes on, beside what every head's run has.
        more: What is found out about the trained head.
    """
    options = task.options
    loss = None if options.divergence == HARD else divergence(options.divergence)

    def made(
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        device: torch.device,
        documents: Sequence[Document],
    ) -> HeadLearner:
        ids = None
        if options.draft_vocab is not None and options.begin is None:
            ids = frequent_tokens(documents, options.draft_vocab, logit_width(target))
        learner = make(Given(target=target, loss=loss, ids=ids, device=device, documents=documents))
        if options.slot_balanced:
            places = learner.places_of(documents, task.settings.max_length)
            learner.slot_weights = tuple(slot_balanced(places).tolist())
        return learner

    shared = DistillTask(
        settings=task.settings,
        target=task.target,
        drafter=None,
        sources=task.sources,
        out=task.out,
        divergence=options.divergence,
        texts="target" if options.regenerate else "fixed",
        capture=options.capture,
        held_out=options.held_out,
        depth=options.depth,
        watch_temperature=options.watch_temperature,
        split=options.split,
        subset=options.subset,
        limit=options.limit,
        as_json=task.as_json,
    )
    kept = {key: value for key, value in asdict(options).items() if key in KEPT}
    about = {**about, **kept, "head": name, "texts": shared.texts}
    run_with(shared, made, regenerated=options.regenerate, about=about, name=name, more=more)
