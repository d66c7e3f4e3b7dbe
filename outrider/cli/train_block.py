"""outrider train dflash, dflare, dspark: train a head that guesses blocks from the target's hidden states."""

from collections.abc import Sequence
from dataclasses import asdict

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from outrider.cli.block_options import BlockOptions, MarkovOptions
from outrider.cli.train_distill import Task as DistillTask
from outrider.cli.train_distill import run_with
from outrider.cli.train_head import Task
from outrider.core.types import InputError
from outrider.heads.dflash import Method
from outrider.learning.batch import Document
from outrider.learning.block_loss import BlockLoss, usual_gamma
from outrider.learning.divergences import HARD, divergence
from outrider.training.blocks import BlockLearner
from outrider.training.fresh_block import Shape, fresh_head, known_head
from outrider.training.positions import slot_balanced


def run_block(task: Task, method: Method, options: BlockOptions, markov: MarkovOptions | None = None) -> None:
    """Train a head, write it and the report, and print what was reached.

    Args:
        method: Its name in the catalog.
        markov: What its sequential head was told, of dspark.
    """
    shared, markov = task.options, markov or MarkovOptions()
    of = None if shared.divergence == HARD else divergence(shared.divergence)
    shape = Shape(
        method=method,
        layers=options.layers,
        block_size=options.block_size,
        taps=options.tapped,
        mask_token_id=options.mask_token_id,
        markov=markov.markov,
        markov_rank=markov.markov_rank,
        confidence=markov.confidence,
    )

    def make(
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        device: torch.device,
        documents: Sequence[Document],
    ) -> BlockLearner:
        if shared.begin is None:
            head = fresh_head(target, tokenizer, shape, seed=task.settings.seed)
        else:
            head = known_head(shared.begin, target, method)
        if shared.depth > head.config.max_depth:
            raise InputError(
                f"a block of {head.config.block_size} guesses {head.config.max_depth} tokens, and --depth is "
                f"{shared.depth}; give a smaller --depth or a larger --block-size"
            )
        gamma = usual_gamma(head.config.block_size) if options.gamma is None else options.gamma
        learner = BlockLearner(
            head.train(),
            target,
            loss=BlockLoss(of=of, hard=options.hard, gamma=gamma, weighting=options.weighting),
            num_anchors=options.num_anchors,
            seed=task.settings.seed,
        )
        if shared.slot_balanced:
            places = learner.places_of(documents, task.settings.max_length)
            learner.slot_weights = tuple(slot_balanced(places).tolist())
        return learner

    given = DistillTask(
        settings=task.settings,
        target=task.target,
        drafter=None,
        sources=task.sources,
        out=task.out,
        divergence=shared.divergence,
        texts="target" if shared.regenerate else "fixed",
        capture=shared.capture,
        held_out=shared.held_out,
        depth=shared.depth,
        watch_temperature=shared.watch_temperature,
        split=shared.split,
        subset=shared.subset,
        limit=shared.limit,
        as_json=task.as_json,
    )
    about = {**asdict(options), **(asdict(markov) if method == "dspark" else {})}
    about |= {"begin": shared.begin, "head": method, "texts": given.texts, "slot_balanced": shared.slot_balanced}
    run_with(given, make, regenerated=shared.regenerate, about=about, name=method)
