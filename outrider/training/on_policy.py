"""Texts that the draft model itself continues, so that it learns on the prefixes that it visits when it drafts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from outrider.core.dice import Draws, PhiloxDice, Purpose, key_of, step_generator
from outrider.learning.batch import PADDING, TrainBatch


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Continues rows of a batch with tokens that the draft model draws at temperature 1.

    A row keeps its prompt and its length at most, so that the number of tokens to learn stays that of the data. A text
    without a prompt keeps a part of itself, up to a drawn place in its first half. A row ends at the end of text.

    Every draw is keyed by the seed, the step and the number of the row, so that it does not depend on the other rows.
    No graph is kept.

    Attributes:
        seed: Of the draws.
        share: Probability that a row is continued by the draft model; the others stay as they are.
        eos_ids: Tokens that end a text.
    """

    seed: int
    share: float = 1.0
    eos_ids: Sequence[int] = ()

    @torch.no_grad()
    def __call__(self, model: PreTrainedModel, batch: TrainBatch) -> TrainBatch:
        """The batch with some of its rows continued by the model. What was captured along the old text is dropped."""
        chosen = [i for i, row in enumerate(batch.rows) if self._uniform(batch.step, row, Purpose.COIN) < self.share]
        if not chosen:
            return replace(batch, hidden={}, rows_of_target=None, logits_of_target=None)
        prompts = [self._prompt(batch, i) for i in chosen]
        drawn = self._drawn(model, batch, chosen, prompts)
        tokens, learnt, lengths = batch.tokens.clone(), batch.learnt.clone(), batch.lengths.clone()
        for i, prompt, continuation in zip(chosen, prompts, drawn, strict=True):
            end = prompt + len(continuation)
            tokens[i, prompt:end], tokens[i, end:] = continuation, PADDING
            learnt[i] = False
            learnt[i, max(prompt, 1) : end] = True
            lengths[i] = end
        return replace(
            batch,
            tokens=tokens,
            learnt=learnt,
            lengths=lengths,
            hidden={},
            rows_of_target=None,
            logits_of_target=None,
            known=None,
        )

    def _prompt(self, batch: TrainBatch, i: int) -> int:
        """How many tokens of a row stay."""
        first, length = int(batch.host.learnt[i].argmax()), int(batch.host.lengths[i])
        if first > 1:
            return first
        half = max(1, length // 2)
        return 1 + int(self._uniform(batch.step, batch.rows[i], Purpose.CUT) * half) if length > 2 else 1

    def _drawn(
        self, model: PreTrainedModel, batch: TrainBatch, chosen: Sequence[int], prompts: Sequence[int]
    ) -> list[Int[Tensor, " tokens"]]:
        """The continuation of each chosen row."""
        longest = max(prompts)
        room = [int(batch.host.lengths[i]) - prompt for i, prompt in zip(chosen, prompts, strict=True)]
        device = batch.tokens.device
        tokens = torch.full((len(chosen), longest), PADDING, device=device)
        mask = torch.zeros_like(tokens)
        for row, (i, prompt) in enumerate(zip(chosen, prompts, strict=True)):
            tokens[row, longest - prompt :] = batch.tokens[i, :prompt]
            mask[row, longest - prompt :] = 1
        seeds = [_key(self.seed, batch.rows[i]) for i in chosen]
        drawing = _Drawing(dice=PhiloxDice(seeds=seeds, steps=[batch.step] * len(chosen)), begin=longest)
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max(room),
            eos_token_id=list(self.eos_ids) or None,
            pad_token_id=PADDING,
            use_cache=True,
        )
        learning, config_of_model = model.training, model.generation_config
        # The model's own settings, such as a repetition penalty, would change what it draws from.
        model.generation_config = GenerationConfig()
        model.eval()
        try:
            generated = model.generate(
                tokens,
                attention_mask=mask,
                generation_config=config,
                logits_processor=LogitsProcessorList([drawing]),
            )
        finally:
            model.generation_config = config_of_model
            model.train(learning)
        return [self._ended(each[longest : longest + most]) for each, most in zip(generated, room, strict=True)]

    def _ended(self, tokens: Int[Tensor, " tokens"]) -> Int[Tensor, " ended"]:
        """A continuation up to its first end of text, which belongs to it."""
        if not self.eos_ids:
            return tokens
        ends = torch.isin(tokens, torch.tensor(list(self.eos_ids), device=tokens.device)).nonzero()
        return tokens[: int(ends[0]) + 1] if len(ends) else tokens

    def _uniform(self, step: int, row: int, purpose: Purpose) -> float:
        return float(step_generator(purpose, seed=self.seed, step=step, row=row).random())


class _Drawing(LogitsProcessor):  # type: ignore[misc]
    """Draws a token from each row and leaves only this one, so that the largest score is a sample."""

    def __init__(self, *, dice: PhiloxDice, begin: int) -> None:
        self.dice, self.begin = dice, begin

    def __call__(
        self, input_ids: Int[Tensor, "rows length"], scores: Float[Tensor, "rows vocab"]
    ) -> Float[Tensor, "rows vocab"]:
        count = len(scores)
        slot = input_ids.shape[1] - self.begin
        draws = Draws(requests=np.arange(count), slots=np.full(count, slot), purpose=Purpose.DRAFT)
        drawn = self.dice.pick(scores.float().softmax(-1), draws)
        return torch.full_like(scores, -torch.inf).scatter(1, drawn[:, None], 0.0)


def _key(seed: int, row: int) -> int:
    """The seed of a row's tokens."""
    return int(key_of(Purpose.TOKENS, seed, row).generate_state(1, np.uint64)[0])
