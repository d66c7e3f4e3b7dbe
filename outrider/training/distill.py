"""DistillSpec: a draft model learns the target's rows, on given texts or on texts that it writes itself.

Zhou et al. 2023, https://arxiv.org/abs/2310.08461
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from outrider.core.types import InputError
from outrider.learning.batch import TrainBatch, on_device
from outrider.learning.divergences import (
    CHUNK,
    HARD,
    Divergence,
    among_likeliest,
    chunked,
    cross_entropy,
    divergence,
    over_top_rows,
)
from outrider.learning.learner import JudgedDrafts, Learner, Loss
from outrider.learning.packing import along, check_apart
from outrider.learning.top_rows import TopRows
from outrider.lm.hf.anatomy import Anatomy
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead, find_embedding_and_head
from outrider.lm.hf.open import logit_width, open_config, open_model, open_tokenizer
from outrider.lm.hf.tokenizer_files import write_tokenizer
from outrider.training.loop.watch import windows
from outrider.training.on_policy import Sampler
from outrider.training.positions import Positions, positions_of

DATA = ("fixed", "target", "on_policy", "mixed")
"""The names of the kinds of data."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """What texts a draft model learns on.

    Attributes:
        regenerated: Whether the target answers the corpus's prompts first.
        share: Probability that the draft model itself continues a row.
    """

    regenerated: bool
    share: float

    @classmethod
    def of(cls, name: str) -> "Data":
        """The data of `fixed`, `target`, `on_policy` or `mixed:share=0.5`.

        Raises:
            InputError: There is no such kind, or the share is no number in 0..1.

        Example:
            >>> Data.of("mixed:share=0.3")
            Data(regenerated=False, share=0.3)
        """
        kind, _, rest = name.partition(":")
        if kind not in DATA or (rest and kind != "mixed"):
            raise InputError(f"unknown data {name!r}; use fixed, target, on_policy or mixed:share=0.5")
        key, _, text = (rest or "share=0.5").partition("=")
        try:
            share = float(text) if key == "share" else -1.0
        except ValueError:
            share = -1.0
        if not 0 <= share <= 1:
            raise InputError(f"data 'mixed' has the field share, a number in 0..1, got {rest!r}")
        return cls(regenerated=kind == "target", share={"on_policy": 1.0, "mixed": share}.get(kind, 0.0))


@dataclass(frozen=True, kw_only=True)
class HiddenStateModel:
    """A model up to its output layer, so that logits can be made for some rows at a time.

    Attributes:
        of: States along rows of tokens, at positions of their own or, with None, at 0, 1, 2, ...
        packed: The same along rows of several texts, each of which begins at position 0 and sees itself alone.
        head: Logits from states.
    """

    of: Callable[[Int[Tensor, "rows length"], Int[Tensor, "rows length"] | None], Float[Tensor, "rows length hidden"]]
    head: Callable[[Float[Tensor, "*batch hidden"]], Float[Tensor, "*batch vocab"]]
    packed: Callable[[Int[Tensor, "rows length"], Int[Tensor, "rows length"]], Float[Tensor, "rows length hidden"]]
    embedding_and_head: EmbeddingAndHead | None = None

    @classmethod
    def find(cls, model: PreTrainedModel) -> "HiddenStateModel":
        """The model in two parts. One whose output layer cannot be told apart has its logits for states."""
        below = model.base_model
        whole = cls(
            of=lambda tokens, at: model(**_inputs(tokens, at)).logits,
            packed=lambda tokens, at: model(input_ids=tokens, position_ids=at, use_cache=False).logits,
            head=lambda logits: logits,
        )
        try:
            embedding_and_head = find_embedding_and_head(model, Anatomy.of(model))
        except InputError:
            return whole
        parts = cls(
            of=lambda tokens, at: below(**_inputs(tokens, at))[0],
            packed=lambda tokens, at: below(input_ids=tokens, position_ids=at, use_cache=False)[0],
            head=embedding_and_head.head,
            embedding_and_head=embedding_and_head,
        )
        tokens = torch.arange(3, 7, device=model.device)[None] % model.get_input_embeddings().weight.shape[0]
        with torch.no_grad():
            ours, theirs = parts.head(parts.of(tokens, None)), whole.of(tokens, None)
        return parts if ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-2, atol=1e-2) else whole


class Distilled(Learner):
    """A draft model that learns from a target.

    Args:
        model: The draft model, in float32.
        target: The target; None trains on hard labels alone and is not watched.
        loss: The divergence; None is the cross-entropy of the text's own tokens.
        sampler: Continues rows by the draft model; None learns on the texts as they are.
        positions: Where the draft model sees the tokens in training; None: at 0, 1, 2, ...
        dtype: Of the written weights.
        tokenizer: Written beside the weights.
        chunk: Rows whose logits are in memory at once.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        target: PreTrainedModel | None,
        *,
        loss: Divergence | None,
        sampler: Sampler | None = None,
        positions: Positions | None = None,
        dtype: torch.dtype | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        chunk: int = CHUNK,
    ) -> None:
        super().__init__()
        if target is None and loss is not None:
            raise InputError("a divergence needs a target")
        self.model = model
        self.divergence, self._sampler, self.positions, self._chunk = loss, sampler, positions, chunk
        self.dtype, self.tokenizer = dtype or model.dtype, tokenizer
        # Hidden in tuples, so that torch takes neither the target nor functions of the model for modules of this one.
        self._target = (target,)
        self._states = (HiddenStateModel.find(model), None if target is None else HiddenStateModel.find(target))
        self._taps = 0 if target is None else Anatomy.of(target).num_layers
        theirs = self._states[1]
        if sampler is None and loss is not None and theirs is not None and theirs.embedding_and_head is not None:
            self.captured_taps = (self._taps,)
        self._packed = False
        self._width = min(logit_width(each) for each in (model, target) if each is not None)

    def forward(self, batch: TrainBatch) -> Loss:
        """The divergence of the rows that guess learnt tokens."""
        if self._sampler is not None:
            batch = self._sampler(self.model, batch)
        places, ours = guessing(batch), self._states[0]
        hidden = self._hidden(batch)[places]
        labels = batch.tokens[:, 1:][places]
        target = None if self.divergence is None else self._target_rows(batch, places)
        agreed = torch.zeros(len(labels), dtype=torch.bool, device=labels.device)

        def loss(rows: slice, logits: Float[Tensor, "rows vocab"]) -> Float[Tensor, " rows"]:
            logits = logits[..., : self._width]
            agreed[rows] = among_likeliest(labels[rows], logits.detach())
            if self.divergence is None or target is None:
                return cross_entropy(labels[rows], logits)
            return target(self.divergence, rows, logits)

        values = chunked(loss, hidden, ours.head, chunk=self._chunk, width=self._width)
        return Loss(
            total=values.sum(),
            weight=torch.full((), float(len(labels)), device=values.device),
            parts={"agreement": agreed.sum()},
        )

    def pack(self) -> None:
        """Let several texts stand in one row of the forwards of both models."""
        if self.positions is not None:
            raise InputError("--pack begins positions at 0 in every text; leave out --positions or --pack")
        check_apart(self.model, "the draft model")
        self._check_target_apart()
        self._packed = True

    def _check_target_apart(self) -> None:
        """Raise InputError if the target lets texts of one row see each other."""
        target = self._target[0]
        if target is not None:
            check_apart(target, "the target")

    def _along(self, states: HiddenStateModel, batch: TrainBatch) -> Float[Tensor, "rows length hidden"]:
        """A model's states along the texts of a batch."""
        if not self._packed:
            return states.of(batch.tokens, None)
        return along(lambda tokens, at: [states.packed(tokens, at)], batch)[0]

    def _hidden(self, batch: TrainBatch) -> Float[Tensor, "rows length hidden"]:
        """The draft model's states below its output layer, as they are trained."""
        if self.positions is None:
            return self._along(self._states[0], batch)
        return self._states[0].of(batch.tokens, self.positions(batch))

    def _target_states(self, batch: TrainBatch, places: tuple[Tensor, Tensor]) -> Float[Tensor, "n hidden"]:
        """The target's states below its output layer at some places: captured ones, or those of a forward now."""
        theirs = cast(HiddenStateModel, self._states[1])
        if theirs.embedding_and_head is not None and self._taps in batch.hidden:
            return theirs.embedding_and_head.norm(batch.hidden[self._taps][places])
        return self._along(theirs, batch)[places]

    def judged(self, batch: TrainBatch, depth: int) -> JudgedDrafts:
        """Drafts along the texts of a batch. A row of a draft model depends on the tokens alone."""
        ours, theirs = self._states
        if theirs is None:
            raise InputError("without a target there is no acceptance to watch")
        places = guessing(batch)
        labels = batch.tokens[:, 1:][places]
        hidden, states = ours.of(batch.tokens, None)[places], self._target_states(batch, places)
        ratios, agrees = self._compared(hidden, states, labels)
        learnt = batch.learnt[:, 1:]
        whole = torch.zeros(learnt.shape, device=learnt.device)
        equal = torch.zeros_like(learnt)
        whole[learnt], equal[learnt] = ratios, agrees
        return windows(whole, equal, learnt, depth)

    def _compared(
        self, hidden: Float[Tensor, "n ours"], states: Float[Tensor, "n theirs"], labels: Int[Tensor, " n"]
    ) -> tuple[Float[Tensor, " n"], Bool[Tensor, " n"]]:
        """The log-ratio of each label's probabilities, and whether the likeliest tokens of both models agree."""
        ours, theirs = self._states[0], cast(HiddenStateModel, self._states[1])
        ratios, agrees = [labels.new_zeros(0, dtype=torch.float32)], [labels.new_zeros(0, dtype=torch.bool)]
        for begin in range(0, len(labels), self._chunk):
            rows = slice(begin, begin + self._chunk)
            log_q = ours.head(hidden[rows])[..., : self._width].float().log_softmax(-1)
            log_p = theirs.head(states[rows])[..., : self._width].float().log_softmax(-1)
            ratios.append((log_q - log_p).gather(-1, labels[rows, None])[:, 0])
            agrees.append(log_q.argmax(-1) == log_p.argmax(-1))
        return torch.cat(ratios), torch.cat(agrees)

    def write(self, folder: Path) -> None:
        """Write a plain transformers directory."""
        write_model(self.model, folder, self.dtype)
        if self.tokenizer is not None:
            write_tokenizer(self.tokenizer, folder)

    def _target_rows(
        self, batch: TrainBatch, places: tuple[Tensor, Tensor]
    ) -> Callable[[Divergence, slice, Tensor], Float[Tensor, " rows"]]:
        """The divergence of some rows, from what was captured of the target, or from a forward of it now."""
        width = self._width
        if batch.logits_of_target is not None:
            logits = batch.logits_of_target[places][..., :width]
            return lambda of, rows, draft: of(logits[rows], draft)
        if batch.rows_of_target is not None:
            kept = batch.rows_of_target
            top = TopRows(tokens=kept.tokens[places], log_probs=kept.log_probs[places], log_rest=kept.log_rest[places])
            return lambda of, rows, draft: over_top_rows(of, top[rows], draft)
        theirs = cast(HiddenStateModel, self._states[1])
        with torch.no_grad():
            states = self._target_states(batch, places)

        def live(of: Divergence, rows: slice, draft: Tensor) -> Tensor:
            with torch.no_grad():
                logits = theirs.head(states[rows])[..., :width]
            return of(logits, draft)

        return live


def distilled(
    drafter: str,
    target: PreTrainedModel | None,
    target_tokenizer: PreTrainedTokenizerBase | None,
    *,
    loss: str,
    data: Data,
    seed: int,
    device: torch.device,
    positions: str = "plain",
    chunk: int = CHUNK,
) -> Distilled:
    """The learner for a draft model that lies in a directory or on the hub.

    Args:
        drafter: The draft model.
        loss: Name of a divergence, or `ce` for hard labels.
        seed: Of what the draft model writes, and of the positions.
        positions: Where the draft model sees the tokens in training: `plain`, `padding` or `gaps`.

    Raises:
        InputError: A model cannot be loaded, its tokenizer is not the target's, or there is no such loss or position.
    """
    of = None if loss == HARD else divergence(loss)
    config, tokenizer = open_config(drafter), open_tokenizer(drafter, what="model")
    check_words(drafter, tokenizer, target_tokenizer)
    model = open_model(drafter, dtype=torch.float32, device=device)
    if target is not None and target_tokenizer is None and logit_width(model) != logit_width(target):
        raise InputError(
            f"the draft model {drafter} has {logit_width(model)} token ids and the target {logit_width(target)}, and "
            "without both tokenizers the two cannot be matched"
        )
    eos = model.generation_config.eos_token_id if model.generation_config is not None else None
    eos_ids = [eos] if isinstance(eos, int) else list(eos or [])
    sampler = Sampler(seed=seed, share=data.share, eos_ids=eos_ids) if data.share > 0 else None
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    return Distilled(
        model,
        target,
        loss=of,
        sampler=sampler,
        positions=positions_of(positions, Anatomy.of(model).longest_context or 1 << 15, seed),
        dtype=dtype,
        tokenizer=tokenizer or target_tokenizer,
        chunk=chunk,
    )


def check_words(
    drafter: str, tokenizer: PreTrainedTokenizerBase | None, target_tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """Raise InputError if the tokenizers of draft model and target give tokens different ids."""
    if tokenizer is None or target_tokenizer is None:
        return
    ours, theirs = tokenizer.get_vocab(), target_tokenizer.get_vocab()
    if ours != theirs:
        same = sum(theirs.get(word) == number for word, number in ours.items())
        raise InputError(
            f"the draft model {drafter} has another tokenizer than the target: {same:,} of the target's "
            f"{len(theirs):,} tokens have the same id. Distillation compares rows token by token; use a draft model "
            "with the target's tokenizer"
        )


def write_model(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
    """Write a model as transformers does, with its weights in a dtype. Tied weights stay tied."""
    converted: dict[tuple[int, tuple[int, ...]], Tensor] = {}
    state = {}
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tuple(tensor.shape))
        if key not in converted or not tensor.numel():
            converted[key] = tensor.to(dtype) if tensor.is_floating_point() else tensor
        state[name] = converted[key]
    before = model.config.dtype
    model.save_pretrained(folder, state_dict=state)
    # transformers writes the dtype of the weights in memory.
    model.config.dtype = dtype
    model.config.save_pretrained(folder)
    model.config.dtype = before


def _inputs(tokens: Int[Tensor, "rows length"], positions: Int[Tensor, "rows length"] | None) -> dict[str, Any]:
    """What a transformers model is called with."""
    inputs: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
    if positions is not None:
        # Without a mask, transformers takes every jump of the positions for the beginning of another text.
        inputs |= {"position_ids": positions, "attention_mask": torch.ones_like(tokens)}
    return inputs


def guessing(batch: TrainBatch) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
    """The places whose logits guess learnt tokens: token j is guessed at j - 1."""
    rows, columns = batch.host.learnt[:, 1:].nonzero()
    return on_device(rows, batch.tokens.device), on_device(columns, batch.tokens.device)
