"""Heads with random weights: two toys, one that goes on with features of its own and one that guesses whole blocks,
and the heads of the catalog.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.modeling_layers import MtpModel

from outrider import catalog
from outrider.drafters.protocol import Drafter
from outrider.heads.mtp import MtpPath
from outrider.heads.parts.layers import Attention, GatedMLP, Rotary
from outrider.heads.spec import HeadSpec
from outrider.heads.trunks.blocks import BlockDrafter
from outrider.heads.trunks.features import OwnFeatures
from outrider.lm.forwards.compilable import KINDS, ForwardKind
from outrider.lm.head import HeadLM
from outrider.lm.target_info import TargetInfo
from tests.world.block_checkpoints import checkpoints
from tests.world.learners import head_learner, moved
from tests.world.own_heads import blockwise, parallel
from tests.world.published import eagle, eagle3, hydra, medusa_of_vllm, mlp_speculator, needs_mtp
from tests.world.published_eagle_variants import griffin, jakiro, poss
from tests.world.zoo import scrambled


class ToyModule(nn.Module):
    """One decoder layer over a token's embedding beside a feature; with `masked`, tokens without features too."""

    def __init__(self, around: TargetInfo, *, masked: bool = False) -> None:
        super().__init__()
        size = around.hidden_size
        config = LlamaConfig(
            hidden_size=size, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=around.max_context
        )
        self.feature_size, self.vocab_size, self.masked = size, around.vocab_size, masked
        self.embedding_and_head = around.embedding_and_head()
        self.kinds = (ForwardKind(logits=False), ForwardKind(features=False)) if masked else KINDS
        self.fc = nn.Linear(2 * size, size)
        self.unknown = nn.Parameter(torch.randn(size))
        self.rotary, self.attention, self.mlp = Rotary(config), Attention(config, 0), GatedMLP(size, 2 * size)

    def forward(self, inputs):
        tokens, features = inputs.tokens, inputs.features
        if features is None:
            features = self.unknown.expand(*tokens.shape, -1)
        elif self.masked:
            # What is kept of a position is made of its feature alone.
            tokens = torch.zeros_like(tokens)
        states = self.fc(torch.cat([self.embedding_and_head.embed(tokens).to(features), features], -1))
        states = states + self.attention(states, self.rotary(states, inputs.positions), inputs)
        return states + self.mlp(states)

    def logits(self, hidden):
        return self.embedding_and_head.head(self.embedding_and_head.norm(hidden))


@dataclass(frozen=True, kw_only=True)
class ToyOwnFeatures(OwnFeatures):
    """Goes on with features of its own."""

    @property
    def taps(self):
        return (1,)


def toy(kind: str, around: TargetInfo, *, compile: bool = False, **more: object) -> OwnFeatures | BlockDrafter:
    """A toy drafter, `own features` or `block`, whose random weights are always the same."""
    torch.manual_seed(5)
    module = ToyModule(around, masked=kind == "block").to(around.device, around.dtype)
    lm = HeadLM(
        module, max_slots=around.max_slots, max_context=around.max_context, forward="compiled" if compile else "eager"
    )
    if kind == "block":
        return BlockDrafter(lm=lm, reads=(2,), block_size=4, mask_id=0, **more)
    return ToyOwnFeatures(lm=lm, **more)


def head(kind: str, around: TargetInfo, **more: object) -> Drafter:
    """A toy, or a head of the catalog that was read from a random checkpoint; the weights are always the same."""
    if kind in TOYS:
        return toy(kind, around, **more)
    if kind in LAYERS:
        return MtpPath().bind(replace(around, mtp=lambda path: _mtp(around, LAYERS[kind])))
    with tempfile.TemporaryDirectory() as folder:
        write_head(kind, Path(folder), around)
        return catalog.make("drafter", f"{kind}:path={folder}").bind(around)


def write_head(kind: str, folder: Path, around: TargetInfo) -> None:
    """Write a random checkpoint of a head: in a layout of `CHECKPOINTS`, or as training writes it."""
    if kind in CHECKPOINTS:
        CHECKPOINTS[kind](folder, around)
        return
    learner = head_learner(kind, around.mtp.__self__.model, depth=3, dtype=around.dtype)
    moved(learner, noise=1.0).write(folder)


def _mtp(around: TargetInfo, count: int) -> MtpModel:
    """Multi-token-prediction layers with random weights for a target that was published without any."""
    needs_mtp()
    target = around.mtp.__self__.model
    target.config.num_mtp_layers = count
    found = MtpModel(target, count)
    scrambled(found.layers.to(around.dtype)).to(around.device)
    return found


OF_ITS_OWN_TARGET = "assistant"
"""Reads the keys and values of the target that it was published with; its tests are in test_published."""
HEADS: dict[str, HeadSpec] = {
    name: row.kind
    for name, row in catalog.rows("drafter").items()
    if isinstance(row.kind, HeadSpec) and name != OF_ITS_OWN_TARGET
}
"""The heads of the catalog that any target can have."""
TRAINED = [name for name, spec in HEADS.items() if spec.options is not None]
"""Those that are trained here."""
TOYS = ("own features", "block")
LAYERS = {"mtp": 3}
"""Drafters with multi-token-prediction layers, and how many."""
CHECKPOINTS: dict[str, Callable[[Path, TargetInfo], object]] = {
    "blockwise": blockwise,
    "medusa": medusa_of_vllm,
    "hydra": hydra,
    "mlp_speculator": mlp_speculator,
    "eagle": eagle,
    "eagle3": eagle3,
    "poss": poss,
    "griffin": griffin,
    "jakiro": jakiro,
    "parallel": parallel,
    "dflash": lambda folder, around: checkpoints(around.vocab_size)["dflash"].save(folder),
    "dflare": lambda folder, around: checkpoints(around.vocab_size)["dflare"].save(folder),
    "dspark": lambda folder, around: checkpoints(around.vocab_size)["dspark-rnn"].save(folder),
}
"""Layouts that others publish, or that training here does not write by default. Other heads need no entry."""
