"""What `generate` asks for, as requests.

A row becomes a request: its processors are the row's whole pipeline from logits to scores, its criteria decide where it
ends.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from outrider.integrate.refusals import is_transformers_own
from outrider.types import InputError, Processor, Request, Sampling, is_blind


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What `generate` asks for.

    Attributes:
        input_ids: The prompts, padded on the left.
        padding: How long each row's padding is.
        processors: From logits to scores, of all rows.
        criteria: Where rows end.
        same_device: Whether the prompts are where the model is; processors expect scores to be where the prompts are.
    """

    input_ids: Int[Tensor, "rows length"]
    padding: Sequence[int]
    processors: Sequence[Processor]
    criteria: Sequence[Any]
    same_device: bool
    config: GenerationConfig

    @property
    def eos_ids(self) -> frozenset[int]:
        return frozenset(t for c in self.criteria if type(c) is EosTokenCriteria for t in c.eos_token_id.tolist())

    @property
    def max_new_tokens(self) -> int:
        """At least one: criteria are asked after a token."""
        longest = min(c.max_length for c in self.criteria if type(c) is MaxLengthCriteria)
        return max(1, longest - self.input_ids.shape[1])

    @property
    def pads(self) -> bool:
        """Whether rows that have ended are padded; without an end token they go on beside the others."""
        return any(hasattr(c, "eos_token_id") for c in self.criteria)

    def request(self, row: int, output: Sequence[int], most: int, seed: int) -> Request:
        """The request that continues a row after `output` by at most `most` tokens."""
        return Request(
            id=str(row),
            prompt=(*self.input_ids[row, self.padding[row] :].tolist(), *output),
            max_new_tokens=most,
            sampling=Sampling(
                temperature=1.0 if self.config.do_sample else 0.0,
                processors=tuple(self._of_row(processor, row) for processor in self.processors),
                seed=seed,
            ),
            eos_ids=self.eos_ids,
            keep_logits=self.keeps_logits,
            ends=self._ends(row),
        )

    @property
    def keeps_logits(self) -> bool:
        return bool(self.config.return_dict_in_generate and (self.config.output_scores or self.config.output_logits))

    def _of_row(self, processor: Processor, row: int) -> Processor:
        """A processor as one row meets it: alone, behind its padding."""
        if is_blind(processor) and self.same_device:
            return processor
        alone = _alone(processor, row)
        return _InRow(
            processor=processor if alone is None else alone,
            padding=self.input_ids[row, : self.padding[row]],
            row=0 if alone is not None else row,
            num_rows=1 if alone is not None else len(self.input_ids),
        )

    def _ends(self, row: int) -> Callable[[Sequence[int]], bool] | None:
        """Whether a row ends after some output, by the criteria that the engine does not know."""
        asked = [c for c in self.criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)]
        if not asked:
            return None
        scores = _Unknown() if self.keeps_logits and self.config.output_scores else None

        def ends(output: Sequence[int]) -> bool:
            said = torch.tensor(list(output), dtype=torch.long, device=self.input_ids.device)
            ids = torch.cat([self.input_ids[row], said])[None].repeat(len(self.input_ids), 1)
            answers = [torch.as_tensor(criterion(ids, scores)).reshape(-1) for criterion in asked]
            return any(bool(answer[row if len(answer) > 1 else 0]) for answer in answers)

        return ends


@dataclass(frozen=True, kw_only=True)
class _InRow:
    """A processor that is given one row's tokens as `generate` gives them: behind its padding and at its place.

    Attributes:
        padding: What stands before the row's prompt.
        row: The row's place; all `num_rows` rows are copies of it.
    """

    processor: Processor
    padding: Int[Tensor, " pads"]
    row: int
    num_rows: int

    def __call__(self, ids: Int[Tensor, "one n"], scores: Float[Tensor, "one vocab"]) -> Float[Tensor, "one vocab"]:
        home = self.padding.device
        before = torch.cat([self.padding, ids[0].to(home)])[None].repeat(self.num_rows, 1)
        after = self.processor(before, scores.to(home).repeat(self.num_rows, 1))
        return after[self.row : self.row + 1].to(scores.device)


class _Unknown:
    """Stands for the scores of earlier steps where a stopping criterion is asked; any use of it is refused."""

    def _refuse(self, *asked: object) -> Any:
        raise InputError("a stopping criterion reads scores, which drafting does not have yet; decide by tokens alone")

    __getitem__ = __iter__ = __len__ = _refuse


def _alone(processor: Processor, row: int) -> Processor | None:
    """A processor for one row of the batch, if transformers makes it and the others do not matter to it."""
    if isinstance(processor, RepetitionPenaltyLogitsProcessor):
        ignored = getattr(processor, "prompt_ignore_length", None)
        if isinstance(ignored, Tensor):
            return RepetitionPenaltyLogitsProcessor(processor.penalty, prompt_ignore_length=ignored[row : row + 1])
        return processor
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        return PrefixConstrainedLogitsProcessor(lambda _, said: allowed(row, said), 1)
    kind = type(processor)
    return processor if is_transformers_own(processor) and not kind.__name__.startswith("Encoder") else None
