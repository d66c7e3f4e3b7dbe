"""Assistants that are published with a target and have a class in transformers: Gemma 4's, and Muse Glimmer's.

Gemma 4's is transformers' module, which reads the target's keys and values. Muse Glimmer's is a DFlash head.

Relied on in transformers (read and run in 5.23), of `Gemma4AssistantForCausalLM` and its unified twin: the modules
`pre_projection`, `model`, `post_projection`, `lm_head` and `masked_embedding`; `model` takes a dict of masks and a dict
of keys and values by layer type, and drops no position where `logits_to_keep` is a tensor.
"""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig

from outrider.core.types import Frontier, Guess, InputError, Running
from outrider.drafters.protocol import Drafter, Rows
from outrider.heads.dflash import ASSISTANTS
from outrider.heads.dflash import SPEC as DFLASH
from outrider.heads.head import Head, TrainedHead
from outrider.heads.spec import HeadSpec
from outrider.heads.trunks.last_state import LastState, LastStateDrafter
from outrider.lm.hf.assistant import open_assistant
from outrider.lm.hf.checkpoint import Checkpoint
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead
from outrider.lm.slots.batch import upload
from outrider.lm.tabular import TABLE_FEATURES
from outrider.lm.target_info import TargetInfo
from outrider.trees.chained import Follow

NAME = "assistant"
SINGLE_POSITION = ("gemma4_assistant", "gemma4_unified_assistant")
"""The model types of assistants that read the target's keys and values."""
KeysValues = tuple[Tensor, Tensor]
"""Keys and values of one layer of a slot, `[length, heads, dim]` each."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What an assistant sees of several requests: one layer's keys and values of each type, padded, with masks.

    Attributes:
        keys_values: By layer type, `[requests, heads, keys, dim]` each.
        masks: By layer type, the keys that may be seen.
        positions: The position of each request's anchor.
    """

    keys_values: Mapping[str, KeysValues]
    masks: Mapping[str, Bool[Tensor, "requests 1 1 keys"]]
    positions: Int[Tensor, "requests 1"]

    def part(self, rows: Sequence[int]) -> "Seen":
        """The same for some of the requests."""
        if list(rows) == list(range(len(self.positions))):
            return self
        index = torch.tensor(rows).to(self.positions.device, non_blocking=True)
        return Seen(
            keys_values={kind: (keys[index], values[index]) for kind, (keys, values) in self.keys_values.items()},
            masks={kind: mask[index] for kind, mask in self.masks.items()},
            positions=self.positions[index],
        )


class Assistant(Head):
    r"""Reads a token and a state, and returns logits of the next token and the next state.

    Every token of a draft is read at one position, that of the anchor. The assistant attends to the target's keys and
    values at all committed positions; layers with a window W see the last $W + 1$ of them. It has no cache of its own,
    and does not see the draft's other tokens.

    Attributes:
        model: The assistant.
        layers: For each type of its layers, the target's layer whose keys and values it reads.

    Args:
        model: The assistant.
        layers: As above.
        embedding_and_head: Those of the target.
        vocab_size: Width of the target's logits.
    """

    def __init__(
        self, model: Any, layers: Mapping[str, int], embedding_and_head: EmbeddingAndHead, vocab_size: int
    ) -> None:
        super().__init__()
        self.model, self.layers = model, layers
        self._embedding_and_head, self._vocab_size = embedding_and_head, vocab_size
        self._window = int(model.config.get_text_config().sliding_window)

    @classmethod
    def load(cls, checkpoint: Checkpoint, target: TargetInfo, trained: TrainedHead) -> "Assistant":
        """The assistant in the dtype and on the device that it shall have."""
        kind = checkpoint.config.get("model_type")
        if kind not in SINGLE_POSITION:
            known = ", ".join((*SINGLE_POSITION, *ASSISTANTS))
            raise InputError(f"{checkpoint.path} holds no assistant but {kind!r}; known are {known}")
        device, dtype = trained.place(target)
        model = open_assistant(checkpoint.path, dtype=dtype, device=device, revision=checkpoint.revision)
        trained.check_target(None, int(model.config.backbone_hidden_size), target)
        trained.check_vocabulary(int(model.config.get_text_config().vocab_size), target)
        layers = _layers(model.config.get_text_config(), target.config, checkpoint.path)
        return cls(model, layers, target.embedding_and_head(), target.vocab_size)

    @property
    def device(self) -> torch.device:
        """Where the assistant is."""
        return torch.device(self.model.device)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that it computes in."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    def cast(self, embedding_and_head: EmbeddingAndHead, dtype: torch.dtype) -> "Assistant":
        """A copy in another dtype, beside another target."""
        return Assistant(copy.deepcopy(self.model).to(dtype), self.layers, embedding_and_head, self._vocab_size)

    def look(self, requests: Sequence[Mapping[str, KeysValues]], positions: Sequence[int]) -> Seen:
        """What the assistant sees of some requests.

        Args:
            requests: For each of them, the keys and values by layer type.
            positions: The position of each request's anchor.
        """
        device, padded = self.model.device, {}
        for kind in self.layers:
            keys, values = (
                pad_sequence([each[kind][i] for each in requests], batch_first=True)
                .transpose(1, 2)
                .to(device, non_blocking=True)
                for i in range(2)
            )
            padded[kind] = keys, values
        lengths = np.array([len(each[next(iter(self.layers))][0]) for each in requests])
        distances = lengths[:, None] - 1 - np.arange(lengths.max())
        behind, places = upload([distances, np.array(positions)[:, None]], device)
        full = (behind >= 0)[:, None, None]
        near = full & (behind <= self._window)[:, None, None]
        masks = {kind: near if kind == "sliding_attention" else full for kind in self.layers}
        return Seen(keys_values=padded, masks=masks, positions=places)

    @torch.inference_mode()
    def forward(
        self, tokens: Int[Tensor, "requests width"], states: Float[Tensor, "requests width hidden"], seen: Seen
    ) -> tuple[Float[Tensor, "requests width vocab"], Float[Tensor, "requests width hidden"]]:
        """Logits of the next token and the next state, for several tokens of each request."""
        model, width = self.model, tokens.shape[1]
        embedded = self._embedding_and_head.embed(tokens).to(states.device, states.dtype)
        hidden = model.model(
            inputs_embeds=model.pre_projection(torch.cat([embedded, states], -1)),
            attention_mask=dict(seen.masks),
            position_ids=seen.positions.expand(-1, width),
            shared_kv_states=dict(seen.keys_values),
            use_cache=False,
            logits_to_keep=torch.arange(width),
        ).last_hidden_state
        return self._logits(hidden)[..., : self._vocab_size], model.post_projection(hidden)

    def _logits(self, hidden: Float[Tensor, "requests width inner"]) -> Float[Tensor, "requests width all"]:
        """Logits of all tokens. With a masked embedder, tokens outside the best clusters have one lower logit.

        That logit is one below the lowest of a whole batch in transformers. Here each node has its own, the one that it
        has alone.
        """
        if self.model.masked_embedding is None:
            logits: Tensor = self.model.lm_head(hidden)
            return logits
        logits = self.model.masked_embedding(hidden, self.model.lm_head.weight)
        chosen = logits > logits.min()
        lowest = torch.where(chosen, logits, torch.inf).amin(-1, keepdim=True)
        return torch.where(chosen, logits, lowest - 1)


class TabularAssistant:
    r"""An assistant given by random tables, for proofs: of the state $s$ and the token $x$ it makes $\tanh(s W + e_x)$.

    Args:
        vocab_size: Width of the logits.
        seed: Of the tables.
    """

    device, dtype = torch.device("cpu"), torch.float64
    layers: Mapping[str, int] = {}

    def __init__(self, vocab_size: int, seed: int) -> None:
        dice = torch.Generator().manual_seed(seed)
        sizes = ((TABLE_FEATURES, TABLE_FEATURES), (vocab_size, TABLE_FEATURES), (TABLE_FEATURES, vocab_size))
        self._tables = [torch.randn(size, dtype=self.dtype, generator=dice) for size in sizes]

    def look(self, requests: Sequence[Mapping[str, KeysValues]], positions: Sequence[int]) -> Seen:
        """It sees nothing of the requests."""
        return Seen(keys_values={}, masks={}, positions=torch.tensor(positions)[:, None])

    def __call__(
        self, tokens: Int[Tensor, "requests width"], states: Float[Tensor, "requests width hidden"], seen: Seen
    ) -> tuple[Float[Tensor, "requests width vocab"], Float[Tensor, "requests width hidden"]]:
        """Logits of the next token and the next state."""
        between, embeddings, output = self._tables
        head_output = torch.tanh(states @ between + embeddings[tokens])
        return head_output @ output, head_output


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
class AssistantDrafter(LastStateDrafter[AssistantState]):
    """Guess by an assistant that reads the target's own keys and values, and keeps none.

    For the first guess it reads the anchor and the target's normed last hidden state before it. For each further guess
    it reads the draft token and the state that it returned itself. transformers takes the likeliest token and verifies
    it as if it had been drawn; here tokens are drawn, so that the target's law is kept.

    transformers also shows the assistant one key too many after a rejection: that of the first rejected token.

    Attributes:
        head: The assistant.
        keys_values: The target's committed keys and values of a slot in a layer.

    References:
        Gemma 4 assistants in transformers. https://huggingface.co/docs/transformers/model_doc/gemma4_assistant
    """

    rows: ClassVar[Rows] = "sampled"
    state: ClassVar[type[Any]] = AssistantState

    head: Assistant | TabularAssistant
    keys_values: Callable[[int, int], KeysValues] = field(compare=False, default=_no_keys_values)

    @classmethod
    def of(cls, head: Assistant, target: TargetInfo, trained: TrainedHead) -> "AssistantDrafter":
        """The drafter with an assistant."""
        return cls(head=head, tap=target.num_layers, norm=target.norm, keys_values=target.keys_values)

    @property
    def device(self) -> torch.device:
        return self.head.device

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        return {} if isinstance(self.head, TabularAssistant) else {"assistant": self.head.model}

    @torch.inference_mode()
    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess:
        each = [{kind: self.keys_values(s.slot, layer) for kind, layer in self.head.layers.items()} for s in states]
        seen = self.head.look(each, [len(s.tokens) - 1 for s in states])
        tokens = torch.tensor([[s.tokens[-1]] for s in states]).to(self.device, non_blocking=True)
        hidden = self.newest(states).to(self.device, self.head.dtype, non_blocking=True)
        logits, head_output = self.head(tokens, hidden[:, None], seen)
        for row, (state, own_state) in enumerate(zip(states, head_output[:, 0], strict=True)):
            drafter_state = self.state_of(state)
            drafter_state.seen, drafter_state.row, drafter_state.head_output = seen, row, {0: own_state}
        return Guess(logits=logits[:, 0])

    @torch.inference_mode()
    def expand(self, states: Sequence[Running], frontier: Frontier) -> Guess:
        owners, first, counts = np.unique(frontier.owners, return_index=True, return_counts=True)
        drafter_states = [self.state_of(states[owner]) for owner in owners.tolist()]
        seen = _seen(drafter_states)
        # Padding repeats the last node of a request.
        columns = np.minimum(np.arange(counts.max()), counts[:, None] - 1)
        index = torch.from_numpy(first[:, None] + columns).to(self.device, non_blocking=True)
        pairs = zip(frontier.owners.tolist(), frontier.parents.tolist(), strict=True)
        before = torch.stack([self.state_of(states[owner]).head_output[parent] for owner, parent in pairs])
        tokens = frontier.tokens.to(self.device, non_blocking=True)
        logits, head_output = self.head(tokens[index], before[index], seen)
        places = np.arange(len(frontier.owners)) - np.repeat(first, counts)
        flat = torch.from_numpy(np.repeat(np.arange(len(drafter_states)), counts) * columns.shape[1] + places)
        flat = flat.to(self.device, non_blocking=True)
        returned = head_output.flatten(0, 1)[flat]
        for i, (owner, node) in enumerate(zip(frontier.owners.tolist(), frontier.nodes.tolist(), strict=True)):
            self.state_of(states[owner]).head_output[node] = returned[i]
        return Guess(logits=logits.flatten(0, 1)[flat])

    def chain(self, states: Sequence[Running], counts: Sequence[int]) -> Follow:
        drafter_states, left = [self.state_of(state) for state in states], np.array(counts)
        seen = _seen(drafter_states)
        before = torch.stack([drafter_state.head_output[0] for drafter_state in drafter_states])

        def step(tokens: Int[Tensor, " n"]) -> Float[Tensor, "n width"]:
            nonlocal seen, before, left
            if not (left > 0).all():
                alive = np.flatnonzero(left > 0)
                seen, before = seen.part(alive.tolist()), before[upload([alive], before.device)[0]]
            left = left[left > 0] - 1
            logits, head_output = self.head(tokens.to(self.device, non_blocking=True)[:, None], before[:, None], seen)
            before = head_output[:, 0]
            return logits[:, 0]

        return step

    def commit(self, states: Sequence[Running], paths: Sequence[Sequence[int]]) -> None:
        for state in states:
            drafter_state = self.state_of(state)
            drafter_state.seen, drafter_state.head_output = None, {}

    def cast(self, target_info: TargetInfo) -> "AssistantDrafter":
        if isinstance(self.head, TabularAssistant):
            return self
        head = self.head.cast(target_info.embedding_and_head(), target_info.dtype)
        return replace(self, head=head, norm=target_info.norm, keys_values=target_info.keys_values)

    def on_tables(self, vocab_size: int, seed: int) -> "AssistantDrafter":
        return AssistantDrafter(head=TabularAssistant(vocab_size, seed), tap=0)


@dataclass(frozen=True, kw_only=True)
class TrainedAssistant(TrainedHead):
    """An assistant in a directory or at a hub id. Muse Glimmer's becomes the drafter of a DFlash head."""

    def bind(self, target: TargetInfo) -> Drafter:
        if self.checkpoint.config.get("model_type") not in ASSISTANTS:
            return super().bind(target)
        fields = {name: value for name, value in vars(self).items() if name != "spec"}
        drafter = DFLASH.at(**fields).bind(target)
        if target.num_layers in drafter.taps:
            raise InputError(
                f"the assistant in {self.path} reads what leaves the target's last layer, and its config does not "
                "say whether before or after the final norm; give the target that it was published with"
            )
        return drafter


def _seen(drafter_states: Sequence[AssistantState]) -> Seen:
    """What the assistant sees of some requests of a draft, which began together."""
    seen = drafter_states[0].seen
    if seen is None:
        raise RuntimeError("a draft begins before its nodes are expanded")
    return seen.part([drafter_state.row for drafter_state in drafter_states])


def published(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether a checkpoint is an assistant."""
    return config.get("model_type") in (*SINGLE_POSITION, *ASSISTANTS)


def _layers(config: PreTrainedConfig, target: PreTrainedConfig | None, path: str) -> dict[str, int]:
    """For each type of the assistant's layers, the target's last layer of that type that keeps keys and values.

    Raises:
        InputError: The target has none, or its keys are of another shape.
    """
    kinds, layers = list(getattr(target, "layer_types", None) or ()), {}
    keeping = kinds[: len(kinds) - int(getattr(target, "num_kv_shared_layers", None) or 0)]
    for kind in dict.fromkeys(config.layer_types):
        if target is None or kind not in keeping or not target.model_type.startswith("gemma4"):
            raise InputError(
                f"the assistant in {path} reads the keys and values of a Gemma 4 target, and this target "
                f"keeps none of the type {kind}; give the target that it was published with"
            )
        layers[kind] = len(keeping) - 1 - keeping[::-1].index(kind)
        ours, theirs = _shape(config, config.layer_types.index(kind)), _shape(target, layers[kind])
        if ours != theirs:
            raise InputError(
                f"the assistant in {path} reads {ours[0]} heads of {ours[1]} numbers, and this "
                f"target keeps {theirs[0]} heads of {theirs[1]}; give the target that it was published with"
            )
    return layers


def _shape(config: PreTrainedConfig, layer: int) -> tuple[int, int]:
    """Heads and width of the keys of a layer."""
    of_layer = config.per_layer_config[layer] if config.is_heterogeneous else config
    return of_layer.num_key_value_heads, of_layer.head_dim


SPEC = HeadSpec(name=NAME, head=Assistant, drafter=AssistantDrafter, published=published, trained=TrainedAssistant)
