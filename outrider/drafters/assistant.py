"""Assistants that are published with a target and have a class in transformers: Gemma 4's, and Muse Glimmer's."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedConfig

from outrider.core.types import Frontier, Guess, InputError, Running
from outrider.drafters.head_path import HeadPath
from outrider.drafters.last_state import LastState, LastStateDrafter, newest
from outrider.drafters.protocol import Rows
from outrider.heads.assistant import Assistant, KeysValues, Seen, TabularAssistant
from outrider.heads.dflash import SPEC as DFLASH
from outrider.heads.parts.block_formats import ASSISTANTS
from outrider.heads.trunks.blocks import BlockDrafter
from outrider.lm.hf.assistant import open_assistant
from outrider.lm.hf.checkpoint import read_config
from outrider.lm.target_info import TargetInfo

SINGLE_POSITION = ("gemma4_assistant", "gemma4_unified_assistant")
"""The model types of assistants that read the target's keys and values."""


@dataclass(kw_only=True)
class AssistantState(LastState):
    """One request's draft; changes in place.

    Attributes:
        seen: What the assistant sees of the requests of this draft's batch.
        row: The request's place there.
        head_output: For the root and each expanded node, the state that the assistant returned.
    """

    seen: Seen | None = None
    row: int = 0
    head_output: dict[int, Float[Tensor, " hidden"]] = field(default_factory=dict)


def _no_keys_values(slot: int, layer: int) -> KeysValues:
    return torch.zeros(1, 1, 1), torch.zeros(1, 1, 1)


@dataclass(frozen=True, kw_only=True)
class AssistantDrafter(LastStateDrafter):
    """Guess by an assistant that reads the target's own keys and values, and keeps none.

    For the first guess it reads the anchor and the target's normed last hidden state before it. For each further guess
    it reads the draft token and the state that it returned itself. transformers takes the likeliest token and verifies
    it as if it had been drawn; here tokens are drawn, so that the target's law is kept.

    transformers also shows the assistant one key too many after a rejection: that of the first rejected token.

    Attributes:
        head: The assistant.
        norm: The target's final norm.
        keys_values: The target's committed keys and values of a slot in a layer.

    References:
        Gemma 4 assistants in transformers. https://huggingface.co/docs/transformers/model_doc/gemma4_assistant
    """

    rows: ClassVar[Rows] = "sampled"

    head: Assistant | TabularAssistant
    norm: Callable[[Tensor], Tensor] = field(compare=False, default=nn.Identity())
    keys_values: Callable[[int, int], KeysValues] = field(compare=False, default=_no_keys_values)

    @property
    def device(self) -> torch.device:
        return self.head.device

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        return self.head.modules

    def fresh(self, num_seen: int = 0, newest: Float[Tensor, " hidden"] | None = None) -> AssistantState:
        return AssistantState(num_seen=num_seen, newest=newest)

    @torch.inference_mode()
    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess:
        each = [{kind: self.keys_values(s.slot, layer) for kind, layer in self.head.layers.items()} for s in states]
        seen = self.head.look(each, [len(s.tokens) - 1 for s in states])
        tokens = torch.tensor([[s.tokens[-1]] for s in states]).to(self.device, non_blocking=True)
        hidden = self.norm(torch.stack([newest(state) for state in states])).to(
            self.device, self.head.dtype, non_blocking=True
        )
        logits, head_output = self.head(tokens, hidden[:, None], seen)
        for row, (state, own_state) in enumerate(zip(states, head_output[:, 0], strict=True)):
            own = _own(state)
            own.seen, own.row, own.head_output = seen, row, {0: own_state}
        return Guess(logits=logits[:, 0])

    @torch.inference_mode()
    def expand(self, states: Sequence[Running], frontier: Frontier) -> Guess:
        owners, first, counts = np.unique(frontier.owners, return_index=True, return_counts=True)
        owns = [_own(states[owner]) for owner in owners.tolist()]
        seen = owns[0].seen
        if seen is None:
            raise RuntimeError("a draft begins before its nodes are expanded")
        # Padding repeats the last node of a request.
        columns = np.minimum(np.arange(counts.max()), counts[:, None] - 1)
        index = torch.from_numpy(first[:, None] + columns).to(self.device, non_blocking=True)
        pairs = zip(frontier.owners.tolist(), frontier.parents.tolist(), strict=True)
        before = torch.stack([_own(states[owner]).head_output[parent] for owner, parent in pairs])
        tokens = frontier.tokens.to(self.device, non_blocking=True)
        logits, head_output = self.head(tokens[index], before[index], seen.part([own.row for own in owns]))
        places = np.arange(len(frontier.owners)) - np.repeat(first, counts)
        flat = torch.from_numpy(np.repeat(np.arange(len(owns)), counts) * columns.shape[1] + places)
        flat = flat.to(self.device, non_blocking=True)
        returned = head_output.flatten(0, 1)[flat]
        for i, (owner, node) in enumerate(zip(frontier.owners.tolist(), frontier.nodes.tolist(), strict=True)):
            _own(states[owner]).head_output[node] = returned[i]
        return Guess(logits=logits.flatten(0, 1)[flat])

    def commit(self, states: Sequence[Running], paths: Sequence[Sequence[int]]) -> None:
        for state in states:
            own = _own(state)
            own.seen, own.head_output = None, {}

    def cast(self, target_info: TargetInfo) -> "AssistantDrafter":
        if isinstance(self.head, TabularAssistant):
            return self
        head = self.head.cast(target_info.ends(), target_info.dtype)
        return replace(self, head=head, norm=target_info.norm, keys_values=target_info.keys_values)

    def on_tables(self, vocab_size: int, seed: int) -> "AssistantDrafter":
        return AssistantDrafter(head=TabularAssistant(vocab_size, seed), tap=0)


@dataclass(frozen=True, kw_only=True)
class AssistantPath(HeadPath):
    """A published assistant before it is bound to a target: `assistant:path=...`.

    Muse Glimmer's assistant is a DFlash head, and becomes the drafter of one.
    """

    @classmethod
    def recognises(cls, config: Mapping[str, Any], names: Collection[str]) -> bool:
        return config.get("model_type") in (*SINGLE_POSITION, *ASSISTANTS)

    def bind(self, target_info: TargetInfo) -> AssistantDrafter | BlockDrafter:
        """Load the assistant."""
        kind = read_config(self.path, revision=self.revision).get("model_type")
        if kind in ASSISTANTS:
            drafter = DFLASH.at(**vars(self)).bind(target_info)
            if target_info.num_layers in drafter.taps:
                raise InputError(
                    f"the assistant in {self.path} reads what leaves the target's last layer, and its config does not "
                    "say whether before or after the final norm; give the target that it was published with"
                )
            return drafter
        if kind not in SINGLE_POSITION:
            known = ", ".join((*SINGLE_POSITION, *ASSISTANTS))
            raise InputError(f"{self.path} holds no assistant but {kind!r}; known are {known}")
        device, dtype = self.place(target_info)
        model = open_assistant(self.path, dtype=dtype, device=device, revision=self.revision)
        self.check_target(None, int(model.config.backbone_hidden_size), target_info)
        self.check_vocabulary(int(model.config.get_text_config().vocab_size), target_info)
        layers = self._layers(model.config.get_text_config(), target_info.config)
        return AssistantDrafter(
            head=Assistant(model, layers, target_info.ends(), target_info.vocab_size),
            tap=target_info.num_layers,
            norm=target_info.norm,
            keys_values=target_info.keys_values,
        )

    def _layers(self, own: PreTrainedConfig, target: PreTrainedConfig | None) -> dict[str, int]:
        """For each type of the assistant's layers, the target's last layer of that type that keeps keys and values.

        Raises:
            InputError: The target has none, or its keys are of another shape.
        """
        kinds, found = list(getattr(target, "layer_types", None) or ()), {}
        keeping = kinds[: len(kinds) - int(getattr(target, "num_kv_shared_layers", None) or 0)]
        for kind in dict.fromkeys(own.layer_types):
            if target is None or kind not in keeping or not target.model_type.startswith("gemma4"):
                raise InputError(
                    f"the assistant in {self.path} reads the keys and values of a Gemma 4 target, and this target "
                    f"keeps none of the type {kind}; give the target that it was published with"
                )
            found[kind] = len(keeping) - 1 - keeping[::-1].index(kind)
            ours, theirs = _shape(own, own.layer_types.index(kind)), _shape(target, found[kind])
            if ours != theirs:
                raise InputError(
                    f"the assistant in {self.path} reads {ours[0]} heads of {ours[1]} numbers, and this "
                    f"target keeps {theirs[0]} heads of {theirs[1]}; give the target that it was published with"
                )
        return found


def _shape(config: PreTrainedConfig, layer: int) -> tuple[int, int]:
    """Heads and width of the keys of a layer."""
    own = config.per_layer_config[layer] if config.is_heterogeneous else config
    return own.num_key_value_heads, own.head_dim


def _own(state: Running) -> AssistantState:
    if not isinstance(state.drafter_state, AssistantState):
        raise TypeError(f"this drafter keeps an AssistantState, got {type(state.drafter_state).__name__}")
    return state.drafter_state
