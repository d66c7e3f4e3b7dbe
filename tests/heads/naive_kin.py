"""GRIFFIN, Jakiro and PosS straight from their descriptions: no cache, no batch, no module of ours."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outrider.lm.hf.embedding_and_head import EmbeddingAndHead
from tests.heads.naive_heads import NaiveEagle, NaiveEagle3, Tensors, attention, feed_forward, normed

Step = tuple[Tensor, Tensor]
"""The logits behind the last pair, and the feature of the next one."""


@dataclass
class NaiveGriffin(NaiveEagle):
    """GRIFFIN."""

    def step(self, tokens: Tensor, features: Tensor, number: int, depth: int) -> Step:
        tensors, size = self.tensors, self.layer["hidden_size"]
        embedded = self.embedded(tokens)
        fused = torch.cat([embedded, features], -1) @ tensors["fc.fc.weight"].T + tensors["fc.fc.bias"]
        norm = tensors["fc.mlp.input_layernorm.weight"]
        left = normed(normed(fused, tensors["fc.post_attention_layernorm.weight"]), norm)
        up = torch.cat([left, normed(embedded, norm)], -1) @ tensors["fc.mlp.up_proj.weight"].T
        fused = fused + (up * torch.sigmoid(up)) @ tensors["fc.mlp.down_proj.weight"].T
        hidden = fused + attention(tensors, "layers.0.self_attn", fused, self.layer)
        both = feed_forward(
            tensors, "layers.0.mlp", normed(hidden, tensors["layers.0.post_attention_layernorm.weight"])
        )
        return self.logits(hidden + both[:, :size])[-1], (hidden + both[:, size:])[-1:]


@dataclass
class NaiveJakiro(NaiveEagle):
    """Jakiro; `mixture` is the config's."""

    mixture: str = "features"
    further: Tensor = field(default_factory=lambda: torch.zeros(0))

    def step(self, tokens: Tensor, features: Tensor, number: int, depth: int) -> Step:
        if number and number == depth - 1:
            return self.logits(self.further), features[-1:]
        tensors = self.tensors
        fused = torch.cat([self.embedded(tokens), features], -1) @ tensors["fc.weight"].T + tensors["fc.bias"]
        hidden = fused + attention(tensors, "layers.0.self_attn", fused, self.layer)
        states = normed(hidden, tensors["layers.0.post_attention_layernorm.weight"])[-1]
        last, e = hidden[-1], [feed_forward(tensors, f"layers.0.mlp_moe.experts.{i}", states) for i in range(2)]
        a, b, c, d = (tensors["layers.0.mlp_moe.gate.weight"] @ states).tolist()
        w = torch.tensor([a, b]).softmax(-1)
        high, low = torch.tensor([c, d]).softmax(-1).tolist() if c > d else torch.tensor([d, c]).softmax(-1).tolist()
        first, second = (0, 1) if c > d else (1, 0)
        self.further = last + high * e[first] - low * e[second]
        mixed = last + w[0] * e[0] + w[1] * e[1]
        if self.mixture == "features":
            return self.logits(mixed), mixed[None]
        w = w if self.mixture == "gate" else torch.tensor([0.5, 0.5])
        q = sum(w[i] * self.logits(last + e[i]).softmax(-1) for i in range(2))
        return q.log(), mixed[None]


@dataclass
class NaivePoss:
    """PosS on EAGLE, or on EAGLE-3 if there are norms of features."""

    tensors: Tensors
    layer: Mapping[str, Any]
    ends: EmbeddingAndHead
    count: int
    steps: int

    def parent(self, number: int) -> NaiveEagle:
        shared = {name: tensor for name, tensor in self.tensors.items() if not name.startswith("layers.")}
        tensors = {
            n.replace(f"layers.{number}.", "layers.0."): t for n, t in self.tensors.items() if f"ers.{number}." in n
        }
        fused = "layers.0.hidden_norm.weight" in tensors
        return (
            NaiveEagle3(shared | tensors, self.layer, self.ends, {})
            if fused
            else NaiveEagle(shared | tensors, self.layer, self.ends)
        )

    def feature(self, states: Tensor) -> Tensor:
        return self.parent(0).feature(states)

    def step(self, tokens: Tensor, features: Tensor, number: int, depth: int) -> Step:
        specialist = self.parent(min(number // self.steps, self.count - 1))
        hidden = specialist.head_output(tokens, features)
        return specialist.logits(hidden[-1]), specialist.next_feature(hidden[-1:])
