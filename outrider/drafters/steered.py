"""A draft model that the target's hidden states steer (SD², Berdoz et al. 2025)."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from outrider.core.option import CheckedOptions, option
from outrider.core.types import Guess, InputError, Request, Running
from outrider.drafters.exports import Exports
from outrider.drafters.model import ModelDrafter, shared_words
from outrider.drafters.protocol import Observed
from outrider.drafters.slotted import TreeState
from outrider.drafters.steering import Steering, SteeringConfig, read_steering
from outrider.lm.hf.open import logit_width, open_config, open_model, open_tokenizer
from outrider.lm.steered import SteeredLM
from outrider.lm.tabular import TABLE_FEATURES, TabularLM, random_rows
from outrider.lm.target_info import TargetInfo


@dataclass(kw_only=True)
class SteeredState(TreeState):
    """One request's slot of the draft model, and what steers it; changes in place.

    Attributes:
        request: The request.
        num_seen: How many of its positions the target's hidden states were observed of, from the first on.
        newest: The tapped states of the last observed position, side by side; None before any.
        vectors: What they add in the draft model's layers, since the last `begin`.
    """

    request: Request
    num_seen: int = 0
    newest: Float[Tensor, " all"] | None = None
    vectors: Float[Tensor, " widths"] | None = None


@dataclass(frozen=True, kw_only=True)
class SteeredDrafter(ModelDrafter[SteeredState]):
    r"""Guess with a draft model whose feed-forward layers the target's newest hidden states steer.

    The newest states are those of the last position before the anchor: from them the target drew the anchor. Their
    vectors $\delta$ are added at all tokens that the draft model reads in a step: committed tokens that it has not read
    yet, the anchor, and all draft tokens. The tokens of the prompt are read without them. What the cache holds of a
    token stays as it was read, under older vectors too.

    So a guess depends on the hidden states, and on how the text was cut into steps.

    Attributes:
        lm: The draft model.
        steering: The module that makes the vectors.

    References:
        Berdoz et al. 2025. https://arxiv.org/abs/2511.09844
    """

    context_pure: ClassVar[bool] = False
    state: ClassVar[type[Any]] = SteeredState
    waits: ClassVar[bool] = False
    trainer: ClassVar[str | None] = "steer"
    exports: ClassVar[Exports] = Exports(instead="model")

    steering: Steering

    @property
    def taps(self) -> tuple[int, ...]:
        return self.steering.config.taps

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        return {**super().modules, "steering": self.steering}

    def open(self, request: Request) -> SteeredState:
        return SteeredState(slot=self.lm.open(), request=request)

    def observe(self, states: Sequence[Running], observed: Observed) -> None:
        counts = observed.counts()
        for i, newest in observed.newest(self.steering.concatenate(observed.taps)).items():
            drafter_state = self.state_of(states[i])
            drafter_state.num_seen += counts[i]
            drafter_state.newest = newest
        super().observe(states, observed)

    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess:
        self._steer([self.state_of(state) for state in states])
        return super().begin(states, depths)

    def needs(self, state: object, length: int) -> int:
        seen = self.checked(state).num_seen
        # Only the states of the last position are kept.
        return seen if seen <= length else max(0, length - 1)

    def reuse(self, state: object, request: Request, length: int) -> SteeredState:
        drafter_state = self.checked(state)
        self.lm.truncate(drafter_state.slot, self._kept(drafter_state, request, length))
        return self._shortened(drafter_state, drafter_state.slot, request, length)

    def fork(self, state: object, request: Request, length: int) -> SteeredState:
        drafter_state = self.checked(state)
        slot = self.lm.copy(drafter_state.slot, self._kept(drafter_state, request, length))
        return self._shortened(drafter_state, slot, request, length)

    def cast(self, target_info: TargetInfo) -> "SteeredDrafter":
        lm = self.lm.cast(target_info.dtype)
        return replace(self, lm=lm, steering=copy.deepcopy(self.steering).to(lm.device, lm.dtype))

    def on_tables(self, vocab_size: int, seed: int) -> "SteeredDrafter":
        config = SteeringConfig(taps=(0,), target_layers=1, target_size=TABLE_FEATURES, widths=(vocab_size,))
        steering = Steering(config).double()
        noise = torch.randn(vocab_size, TABLE_FEATURES, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            steering.inject.weight.copy_(noise)
        return SteeredDrafter(lm=TabularLM(random_rows(vocab_size, seed), vocab_size), steering=steering)

    @torch.inference_mode()
    def _steer(self, drafter_states: Sequence[SteeredState]) -> None:
        """Make the vectors of each request from its newest states."""
        known = [
            (drafter_state, drafter_state.newest)
            for drafter_state in drafter_states
            if drafter_state.newest is not None
        ]
        if known:
            stacked = torch.stack([newest for _, newest in known]).to(self.lm.device, self.lm.dtype)
            for (drafter_state, _), vectors in zip(known, self.steering(stacked), strict=True):
                drafter_state.vectors = vectors

    def _features(self, states: Sequence[Running]) -> Float[Tensor, "n widths"]:
        return torch.stack([self._vectors(self.state_of(state)) for state in states])

    def _newest_features(self, state: Running, count: int) -> Float[Tensor, "count widths"]:
        steered = self._vectors(self.state_of(state)).expand(count, -1)
        in_prompt = len(state.request.prompt) - (len(state.tokens) - count)
        if in_prompt <= 0:
            return steered
        return torch.cat([torch.zeros_like(steered[:in_prompt]), steered[in_prompt:]])

    def _vectors(self, drafter_state: SteeredState) -> Float[Tensor, " widths"]:
        if drafter_state.vectors is None:
            return torch.zeros(sum(self.steering.config.widths), device=self.lm.device, dtype=self.lm.dtype)
        return drafter_state.vectors

    def _kept(self, drafter_state: SteeredState, request: Request, length: int) -> int:
        """How many tokens of the draft model's cache another text with the same first `length` tokens can use.

        Another request would read tokens that were output here as a part of its prompt, without vectors.
        """
        if request is not drafter_state.request:
            length = min(length, len(drafter_state.request.prompt))
        return min(length, self.lm.length(drafter_state.slot))

    def _shortened(self, drafter_state: SteeredState, slot: int, request: Request, length: int) -> SteeredState:
        """The state after the first `length` tokens of a text."""
        newest = drafter_state.newest if drafter_state.num_seen <= length else None
        return SteeredState(slot=slot, request=request, num_seen=self.needs(drafter_state, length), newest=newest)


@dataclass(frozen=True, kw_only=True)
class SteeredPath(CheckedOptions):
    """A steered draft model before it is bound to a target: `steered:path=...`.

    Attributes:
        path: Directory or hub id of a draft model with its steering, as `outrider train steer` writes it.
        device: Where it runs; by default on the target's device.
        dtype: The dtype that it computes in; by default the target's.
        revision: Branch, tag or commit of a hub id.
        max_context: Longest context; by default as long as the model and the memory allow.
    """

    path: str
    device: str | None = None
    dtype: str | None = None
    revision: str | None = None
    max_context: int | None = option(None, least=1)

    def check_files(self) -> None:
        self.read_config()

    def read_config(self) -> PreTrainedConfig:
        return open_config(self.path, revision=self.revision)

    def read_tokenizer(self) -> PreTrainedTokenizerBase | None:
        return open_tokenizer(self.path, revision=self.revision)

    def bind(self, target_info: TargetInfo) -> SteeredDrafter:
        """Load the draft model and its steering."""
        steering = read_steering(self.path, revision=self.revision)
        self._check_target(steering.config, target_info)
        model = open_model(
            self.path,
            dtype=self.dtype or target_info.dtype,
            device=self.device or target_info.device,
            revision=self.revision,
        )
        width = logit_width(model)
        if shared_words(self.path, self.read_tokenizer(), width, target_info) is not None:
            raise InputError(
                f"the draft model {self.path} has another vocabulary than the target, and a steered draft model needs "
                "the same one; use drafter model"
            )
        lm = SteeredLM(
            model,
            max_slots=target_info.max_slots,
            max_context=self.max_context,
            vocab_size=min(width, target_info.vocab_size),
        )
        widths = tuple(part.width for part in lm.parts)
        if widths != steering.config.widths:
            raise InputError(
                f"the steering in {self.path} was made for feed-forward layers of widths "
                f"{list(steering.config.widths)}, and the draft model beside it has {list(widths)}; train it again"
            )
        return SteeredDrafter(lm=lm, vocab_size=target_info.vocab_size, steering=steering.to(lm.device, lm.dtype))

    def _check_target(self, config: SteeringConfig, target_info: TargetInfo) -> None:
        """Raise InputError if the steering was made for another kind of target."""
        if not target_info.num_layers:
            raise InputError("a steered draft model reads the target's hidden states, and this target shows none")
        made_for, here = (
            (config.target_layers, config.target_size),
            (target_info.num_layers, target_info.hidden_size),
        )
        if made_for != here:
            raise InputError(
                f"the steering in {self.path} was made for a target with {made_for[0]} layers of width {made_for[1]}, "
                f"and this target has {here[0]} layers of width {here[1]}"
            )
