"""EAGLE-1 and EAGLE-3 straight from the descriptions of their files: no cache, no batch, no module of ours."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.lm.hf.embedding_and_head import EmbeddingAndHead

Tensors = Mapping[str, Tensor]


def normed(states: Tensor, weight: Tensor) -> Tensor:
    return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def turned(states: Tensor, theta: float) -> Tensor:
    """Rotary positions 0, 1, 2, ... of vectors `[n, heads, dim]`."""
    count, _, dim = states.shape
    angles = torch.arange(count)[:, None] * theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    cosines, sines = angles.cos()[:, None], angles.sin()[:, None]
    first, second = states[..., : dim // 2], states[..., dim // 2 :]
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1)


def attention(tensors: Tensors, name: str, states: Tensor, layer: Mapping[str, Any]) -> Tensor:
    heads, shared = layer["num_attention_heads"], layer["num_key_value_heads"]

    def part(letter: str, count: int) -> Tensor:
        heads_of = states @ tensors[f"{name}.{letter}_proj.weight"].T + tensors.get(f"{name}.{letter}_proj.bias", 0)
        heads_of = heads_of.view(len(states), count, -1)
        weight = tensors.get(f"{name}.{letter}_norm.weight")
        return heads_of if weight is None else normed(heads_of, weight)

    queries, keys, values = part("q", heads), part("k", shared), part("v", shared)
    queries, keys = turned(queries, layer["rope_theta"]), turned(keys, layer["rope_theta"])
    before, outputs = torch.ones(len(states), len(states)).tril().bool(), []
    for head in range(heads):
        shared_head = head // (heads // shared)
        scores = queries[:, head] @ keys[:, shared_head].T / queries.shape[-1] ** 0.5
        outputs.append(scores.masked_fill(~before, -torch.inf).softmax(-1) @ values[:, shared_head])
    return torch.cat(outputs, -1) @ tensors[f"{name}.o_proj.weight"].T


def feed_forward(tensors: Tensors, name: str, states: Tensor) -> Tensor:
    gate = states @ tensors[f"{name}.gate_proj.weight"].T
    up = states @ tensors[f"{name}.up_proj.weight"].T
    return (gate * torch.sigmoid(gate) * up) @ tensors[f"{name}.down_proj.weight"].T


def plain_layer(tensors: Tensors, name: str, hidden: Tensor, layer: Mapping[str, Any]) -> Tensor:
    weight = tensors.get(f"{name}.input_layernorm.weight")
    states = hidden if weight is None else normed(hidden, weight)
    hidden = hidden + attention(tensors, f"{name}.self_attn", states, layer)
    after = normed(hidden, tensors[f"{name}.post_attention_layernorm.weight"])
    return hidden + feed_forward(tensors, f"{name}.mlp", after)


@dataclass
class NaiveEagle:
    """EAGLE-1."""

    tensors: Tensors
    layer: Mapping[str, Any]
    ends: EmbeddingAndHead

    def embedded(self, tokens: Tensor) -> Tensor:
        table = self.tensors.get("embed_tokens.weight")
        return self.ends.embed(tokens) if table is None else table[tokens]

    def feature(self, states: Tensor) -> Tensor:
        return self.ends.norm(states)

    def head_output(self, tokens: Tensor, features: Tensor) -> Tensor:
        both = torch.cat([self.embedded(tokens), features], -1)
        hidden = both @ self.tensors["fc.weight"].T + self.tensors.get("fc.bias", 0)
        for i in range(self.layer["num_hidden_layers"]):
            hidden = plain_layer(self.tensors, f"layers.{i}", hidden, self.layer)
        return hidden

    def next_feature(self, hidden: Tensor) -> Tensor:
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.ends.head(hidden)


@dataclass
class NaiveEagle3(NaiveEagle):
    """EAGLE-3; `flags` are the config's."""

    flags: Mapping[str, bool]

    def feature(self, states: Tensor) -> Tensor:
        if self.flags.get("norm_before_fc"):
            states = normed(states, self.tensors["input_norm.weight"])
        if self.flags.get("fc_norm"):
            parts = states.chunk(3, -1)
            states = torch.cat([normed(part, self.tensors[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)], -1)
        return states @ self.tensors["fc.weight"].T

    def head_output(self, tokens: Tensor, features: Tensor) -> Tensor:
        first = "midlayer" if "midlayer.hidden_norm.weight" in self.tensors else "layers.0"
        right = normed(features, self.tensors[f"{first}.hidden_norm.weight"])
        left = normed(self.embedded(tokens), self.tensors[f"{first}.input_layernorm.weight"])
        residual = right if self.flags.get("norm_before_residual") else features
        hidden = residual + attention(self.tensors, f"{first}.self_attn", torch.cat([left, right], -1), self.layer)
        after = normed(hidden, self.tensors[f"{first}.post_attention_layernorm.weight"])
        hidden = hidden + feed_forward(self.tensors, f"{first}.mlp", after)
        for i in range(1, self.layer["num_hidden_layers"]):
            hidden = plain_layer(self.tensors, f"layers.{i}", hidden, self.layer)
        return hidden

    def next_feature(self, hidden: Tensor) -> Tensor:
        return normed(hidden, self.tensors["norm.weight"]) if self.flags.get("norm_output") else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        last = normed(hidden, self.tensors["norm.weight"])
        output = self.tensors.get("lm_head.weight")
        if output is None:
            return self.ends.head(last)
        if "d2t" not in self.tensors:
            return last @ output.T
        wide = torch.full((*last.shape[:-1], self.layer["vocab_size"]), -torch.inf, dtype=last.dtype)
        for i, offset in enumerate(self.tensors["d2t"].tolist()):
            wide[..., i + offset] = last @ output[i]
        return wide
