"""A batch of `generate` as requests of the engine.

Each row becomes a request. Its processors are the row's whole pipeline from logits to scores. It ends by its own end
tokens, length and stop strings, and by the criteria that look at all rows together.
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
    MaxTimeCriteria,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StopStringCriteria,
)

from outrider.core.processors import Processor, is_blind
from outrider.core.types import Request, Sampling
from outrider.integrate.refusals import is_transformers_own

_BY_ROW = (MaxTimeCriteria, StopStringCriteria)
"""transformers' criteria whose answer for a row depends on that row alone. They need not wait for other rows."""


@dataclass(frozen=True, kw_only=True)
class GenerateBatch:
    """The arguments of one `generate` call.

    Attributes:
        input_ids: The prompts, padded on the left.
        padding: Length of each row's padding.
        processors: From logits to scores, of all rows.
        criteria: Where rows end.
        same_device: Whether the prompts are on the model's device; processors expect scores on the prompts' device.
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
        """At least one, because criteria are called after a token."""
        longest = min(c.max_length for c in self.criteria if type(c) is MaxLengthCriteria)
        return max(1, longest - self.input_ids.shape[1])

    @property
    def pads(self) -> bool:
        """Whether ended rows are padded. Without an end token, `generate` continues them until all rows end."""
        return any(hasattr(c, "eos_token_id") for c in self.criteria)

    @property
    def pad(self) -> int:
        """The token that pads ended rows."""
        pad = self.config._pad_token_tensor
        return 0 if pad is None else int(pad)

    @property
    def callers_criteria(self) -> Sequence[Any]:
        """The caller's own criteria. They are called for all rows together, because they may look at several rows."""
        known = (EosTokenCriteria, MaxLengthCriteria, *(_BY_ROW if self.pads else ()))
        return [c for c in self.criteria if type(c) not in known]

    def request(self, row: int, seed: int) -> Request:
        """The request that continues a row."""
        return Request(
            id=str(row),
            prompt=tuple(self.input_ids[row, self.padding[row] :].tolist()),
            max_new_tokens=self.max_new_tokens,
            sampling=Sampling(
                temperature=1.0 if self.config.do_sample else 0.0,
                processors=tuple(self._of_row(processor, row) for processor in self.processors),
                seed=seed,
            ),
            eos_ids=self.eos_ids,
            keep_logits=self.keeps_logits,
            ends=self._end_of_row(row),
        )

    @property
    def keeps_scores(self) -> bool:
        return bool(self.config.return_dict_in_generate and self.config.output_scores)

    @property
    def keeps_logits(self) -> bool:
        return self.keeps_scores or bool(self.config.return_dict_in_generate and self.config.output_logits)

    def _of_row(self, processor: Processor, row: int) -> Processor:
        """A processor for one row: it gets the row alone, behind its padding."""
        if is_blind(processor) and self.same_device:
            return processor
        alone = _alone(processor, row)
        return _InRow(
            processor=processor if alone is None else alone,
            padding=self.input_ids[row, : self.padding[row]],
            row=0 if alone is not None else row,
            num_rows=1 if alone is not None else len(self.input_ids),
        )

    def _end_of_row(self, row: int) -> Callable[[Sequence[int]], bool] | None:
        """Whether a row ends after this output, by the criteria that look at one row."""
        criteria = [c for c in self.criteria if self.pads and type(c) in _BY_ROW]
        if not criteria:
            return None

        def is_over(output: Sequence[int]) -> bool:
            output_ids = torch.tensor(list(output), dtype=torch.long, device=self.input_ids.device)
            ids = torch.cat([self.input_ids[row], output_ids])[None]
            return any(bool(criterion(ids, None)) for criterion in criteria)

        return is_over


@dataclass(frozen=True, kw_only=True)
class _InRow:
    """A processor that gets one row as `generate` gives it: behind its padding, at its place in the batch.

    Attributes:
        padding: The padding before the row's prompt.
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


def _alone(processor: Processor, row: int) -> Processor | None:
    """A processor for one row of the batch, if it is transformers' own and does not look at other rows."""
    if isinstance(processor, RepetitionPenaltyLogitsProcessor):
        ignored = getattr(processor, "prompt_ignore_length", None)
        if isinstance(ignored, Tensor):
            return RepetitionPenaltyLogitsProcessor(processor.penalty, prompt_ignore_length=ignored[row : row + 1])
        return processor
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        return PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row, ids), 1)
    kind = type(processor)
    return processor if is_transformers_own(processor) and not kind.__name__.startswith("Encoder") else None
