"""A published assistant of Gemma 4: transformers' module, which reads the target's keys and values.

Relied on in transformers (read and run in 5.23), of `Gemma4AssistantForCausalLM` and its unified twin: the modules
`pre_projection`, `model`, `post_projection`, `lm_head` and `masked_embedding`; `model` takes a dict of masks and a dict
of keys and values by layer type, and drops no position where `logits_to_keep` is a tensor.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from outrider.lm.hf.embedding_and_head import EmbeddingAndHead
from outrider.lm.tabular import TABLE_FEATURES

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


class Assistant:
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
        ends: The target's ends.
        vocab_size: Width of the target's logits.
    """

    def __init__(self, model: Any, layers: Mapping[str, int], ends: EmbeddingAndHead, vocab_size: int) -> None:
        self.model, self.layers = model, layers
        self._ends, self._vocab_size = ends, vocab_size
        self._window = int(model.config.get_text_config().sliding_window)

    @property
    def device(self) -> torch.device:
        """Where the assistant is."""
        return torch.device(self.model.device)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that it computes in."""
        found: torch.dtype = self.model.dtype
        return found

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """Its modules by name."""
        return {"assistant": self.model}

    def cast(self, ends: EmbeddingAndHead, dtype: torch.dtype) -> "Assistant":
        """A copy in another dtype, beside another target."""
        return Assistant(copy.deepcopy(self.model).to(dtype), self.layers, ends, self._vocab_size)

    def look(self, requests: Sequence[Mapping[str, KeysValues]], positions: Sequence[int]) -> Seen:
        """What the assistant sees of some requests.

        Args:
            requests: For each of them, the keys and values by layer type.
            positions: The position of each request's anchor.
        """
        device, padded = self.model.device, {}
        for kind in self.layers:
            keys, values = (
                pad_sequence([each[kind][i] for each in requests], batch_first=True).transpose(1, 2).to(device)
                for i in range(2)
            )
            padded[kind] = keys, values
        lengths = torch.tensor([len(each[next(iter(self.layers))][0]) for each in requests])
        behind = lengths[:, None] - 1 - torch.arange(int(lengths.max()))
        full, near = (behind >= 0)[:, None, None], ((behind >= 0) & (behind <= self._window))[:, None, None]
        masks = {kind: (near if kind == "sliding_attention" else full).to(device) for kind in self.layers}
        return Seen(keys_values=padded, masks=masks, positions=torch.tensor(positions)[:, None].to(device))

    @torch.inference_mode()
    def __call__(
        self, tokens: Int[Tensor, "requests width"], states: Float[Tensor, "requests width hidden"], seen: Seen
    ) -> tuple[Float[Tensor, "requests width vocab"], Float[Tensor, "requests width hidden"]]:
        """Logits of the next token and the next state, for several tokens of each request."""
        model, width = self.model, tokens.shape[1]
        embedded = self._ends.embed(tokens).to(states.device, states.dtype)
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
            found: Tensor = self.model.lm_head(hidden)
            return found
        found = self.model.masked_embedding(hidden, self.model.lm_head.weight)
        chosen = found > found.min()
        lowest = torch.where(chosen, found, torch.inf).amin(-1, keepdim=True)
        return torch.where(chosen, found, lowest - 1)


class TabularAssistant:
    r"""An assistant given by random tables, for proofs: of the state $s$ and the token $x$ it makes $\tanh(s W + e_x)$.

    Args:
        vocab_size: Width of the logits.
        seed: Of the tables.
    """

    device, dtype = torch.device("cpu"), torch.float64
    layers: Mapping[str, int] = {}
    modules: Mapping[str, nn.Module] = {}

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
