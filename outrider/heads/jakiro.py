r"""Jakiro: EAGLE with two small experts, whose contrast guesses the last token without a forward (Huang et al. 2025).

https://arxiv.org/abs/2502.06282
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from reprlib import repr as short
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedConfig

from outrider.core.types import Frontier, Guess, InputError, Running
from outrider.drafters.exports import Exports
from outrider.heads.eagle import EagleHead, EagleObjective, EagleTrunkOptions, TrainedEagle
from outrider.heads.head import HeadFiles, TrainedHead
from outrider.heads.objective import LearntPositions
from outrider.heads.parts.layers import DecoderLayer, GatedMLP
from outrider.heads.spec import HeadSpec
from outrider.heads.trunks.features import FeatureDrafter, FeatureState
from outrider.learning.batch import TrainBatch
from outrider.learning.options import loss, size
from outrider.lm.hf.checkpoint import KIND, Checkpoint, TargetShape
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead
from outrider.lm.slots.chain import chain
from outrider.lm.slots.head_inputs import HeadInputs
from outrider.lm.tabular import TabularFusion
from outrider.lm.target_info import TargetInfo
from outrider.trees.chained import Follow

MIXTURES = ("features", "gate", "half")
"""What is mixed: the experts' outputs, or their distributions by the gate's weights or by halves."""
NAME = "jakiro"
EXPERTS = ("layers.0.mlp_moe.", "layers.0.mlp.")
"""What the names of the experts and their gate begin with: in files, and in `JakiroHead`."""


@dataclass(frozen=True, kw_only=True)
class JakiroOptions(EagleTrunkOptions):
    """Train a Jakiro head: an EAGLE head with two small experts, which also guesses one token further.

    Attributes:
        expert_size: Width of each expert's feed-forward. By default the target's hidden size.
        contrast: Weight of the guess that reaches one token further; the other guess has weight 1.
        mixture: What is mixed for a guess: the experts' outputs (features), or their distributions by the gate's
            weights (gate) or by halves (half).
    """

    expert_size: int | None = size(None, least=1)
    contrast: float = loss(0.5, least=0)
    mixture: str = size("features", among=MIXTURES)


class Experts(nn.Module):
    """Two experts and the four logits of their gate: for the next token and for the one behind it.

    Args:
        hidden_size: Width of what they read.
        expert_size: Width of each expert's feed-forward.
    """

    def __init__(self, hidden_size: int, expert_size: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden_size, 4, bias=False)
        self.experts = nn.ModuleList(GatedMLP(hidden_size, expert_size) for _ in range(2))

    def forward(self, states: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch parts"]:
        """Both outputs and the gate's logits, side by side."""
        return torch.cat([*(expert(states) for expert in self.experts), self.gate(states)], -1)


class ExpertLayer(DecoderLayer):
    """A decoder layer with two experts in place of its feed-forward. It returns the attention's output $y$, the
    experts' outputs and the gate's logits, side by side.
    """

    def __init__(self, config: PreTrainedConfig, expert_size: int, *, qkv_bias: bool | None = None) -> None:
        super().__init__(config, 0, input_norm=False, qkv_bias=qkv_bias)
        self.mlp = Experts(config.hidden_size, expert_size)

    def forward(
        self, hidden: Float[Tensor, "rows width hidden"], rotary: Float[Tensor, "2 rows width dim"], inputs: HeadInputs
    ) -> Float[Tensor, "rows width parts"]:
        hidden = hidden + self.self_attn(hidden, rotary, inputs)
        return torch.cat([hidden, self.mlp(self.post_attention_layernorm(hidden))], -1)


class JakiroHead(EagleHead):
    r"""An EAGLE head of one layer with two experts $e_0, e_1$ over the attention's output $y$.

    The next feature is their mixture, $h_1 = y + w_0 e_0 + w_1 e_1$. The contrast
    $h_2 = y + c_{hi} e_{hi} - c_{lo} e_{lo}$ guesses one token further, without a forward. The weights are softmaxes of
    two logits of the gate each.

    The next token is guessed from $h_1$; or, where distributions are mixed, with
    $q = w_0 \mathrm{softmax}(W(y + e_0)) + w_1 \mathrm{softmax}(W(y + e_1))$. The authors' own sampler over two
    experts does not keep the target's law; drawing from $q$ does.

    Args:
        config: The sizes of its layer.
        embedding_and_head: Those of the target.
        vocab_size: Width of the target's logits.
        expert_size: Width of each expert's feed-forward; None: the hidden size.
        mixture: What is mixed.

    References:
        Huang et al. 2025. https://arxiv.org/abs/2502.06282
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        embedding_and_head: EmbeddingAndHead,
        *,
        vocab_size: int,
        bias: bool = False,
        own_embedding: bool = False,
        qkv_bias: bool | None = None,
        expert_size: int | None = None,
        mixture: str = "features",
    ) -> None:
        if mixture not in MIXTURES:
            raise InputError(f"mixture must be one of {', '.join(MIXTURES)}, got {short(mixture)}")
        self._expert_size, self.mixture = expert_size or config.hidden_size, mixture
        super().__init__(
            config, embedding_and_head, vocab_size=vocab_size, bias=bias, own_embedding=own_embedding, qkv_bias=qkv_bias
        )

    def extra_repr(self) -> str:
        """The choice that no tensor shows."""
        return f"mixture={self.mixture}"

    def layer(self, number: int, qkv_bias: bool | None) -> DecoderLayer:
        if number:
            raise InputError(f"a Jakiro head has one layer, got {self.config.num_hidden_layers}")
        return ExpertLayer(self.config, self._expert_size, qkv_bias=qkv_bias)

    @classmethod
    def sizes(cls, options: "JakiroOptions") -> dict[str, Any]:
        return {"expert_size": options.expert_size, "mixture": options.mixture}

    @classmethod
    def sizes_in(cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        gate = tensors.get(f"{EXPERTS[1]}experts.0.gate_proj.weight")
        size = None if gate is None or not len(gate) else len(gate)
        mixture = config.get("mixture", MIXTURES[0])
        if mixture not in MIXTURES:
            raise InputError(
                f"mixture in the config of a Jakiro head must be {', '.join(MIXTURES)}, got {short(mixture)}"
            )
        return {"mixture": mixture, "expert_size": size}

    @classmethod
    def load(cls, checkpoint: Checkpoint, target: TargetInfo, trained: TrainedHead) -> "JakiroHead":
        head = cast(JakiroHead, super().load(checkpoint, target, trained))
        if isinstance(trained, TrainedJakiro) and trained.mixture != "config":
            head.mixture = trained.mixture
        return head

    @classmethod
    def layout(
        cls, path: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> tuple[PreTrainedConfig, dict[str, Tensor]]:
        return super().layout(path, config, {name.replace(*EXPERTS): tensor for name, tensor in tensors.items()})

    def own_config(self) -> dict[str, Any]:
        return super().own_config() | {"architectures": ["JakiroHead"], KIND: NAME, "mixture": self.mixture}

    def record(self, target: TargetShape, dtype: torch.dtype, name: str) -> HeadFiles:
        """With the names of its authors' tensors."""
        config, tensors = super().record(target, dtype, name)
        return config, {ours.replace(EXPERTS[1], EXPERTS[0]): tensor for ours, tensor in tensors.items()}

    def next_feature(self, head_output: Float[Tensor, "*batch parts"]) -> Float[Tensor, "*batch hidden"]:
        """$h_1$."""
        attended, first, second, gate = self._parts(head_output)
        weights = gate[..., :2].softmax(-1)
        return attended + weights[..., :1] * first + weights[..., 1:] * second

    def contrast(self, head_output: Float[Tensor, "*batch parts"]) -> Float[Tensor, "*batch hidden"]:
        """$h_2$."""
        attended, first, second, gate = self._parts(head_output)
        weights = gate[..., 2:].softmax(-1)
        difference = weights[..., :1] * first - weights[..., 1:] * second
        return attended + torch.where(gate[..., 2:3] >= gate[..., 3:], difference, -difference)

    def further(self, head_output: Float[Tensor, "*batch parts"]) -> Float[Tensor, "*batch parts"]:
        """What guesses one token further: its next feature is $h_2$, and its logits are those of $h_2$."""
        size = self.feature_size
        return torch.cat([self.contrast(head_output), torch.zeros_like(head_output[..., size:])], -1)

    def logits(self, hidden: Float[Tensor, "*batch parts"]) -> Float[Tensor, "*batch width"]:
        if self.mixture == "features":
            return super().logits(self.next_feature(hidden))
        attended, first, second, gate = self._parts(hidden)
        wide = torch.promote_types(gate.dtype, torch.float32)
        logs = [super(JakiroHead, self).logits(attended + part).to(wide).log_softmax(-1) for part in (first, second)]
        gate = gate[..., :2] if self.mixture == "gate" else torch.zeros_like(gate[..., :2])
        weights = gate.to(wide).log_softmax(-1)
        return torch.logaddexp(logs[0] + weights[..., :1], logs[1] + weights[..., 1:])

    def _parts(self, head_output: Float[Tensor, "*batch parts"]) -> tuple[Tensor, ...]:
        """The attention's output, the experts' outputs, and the gate's logits."""
        size = self.feature_size
        return head_output.split([size, size, size, 4], -1)


@dataclass(kw_only=True)
class JakiroState(FeatureState):
    """One request's slot and features; changes in place.

    Attributes:
        depth: Deepest node of its draft.
    """

    depth: int = 0


@dataclass(frozen=True, kw_only=True)
class JakiroDrafter(FeatureDrafter[JakiroState]):
    """Guess by a head that can guess one token further. Drafts of depth d take d - 1 forwards, d above 1: the deepest
    guesses are made from what was output at the parents of their nodes. They do not depend on the nodes' tokens.

    References:
        Huang et al. 2025. https://arxiv.org/abs/2502.06282
    """

    state: ClassVar[type[Any]] = JakiroState

    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess:
        for state, depth in zip(states, depths, strict=True):
            self.state_of(state).depth = depth
        return super().begin(states, depths)

    def expand(self, states: Sequence[Running], frontier: Frontier) -> Guess:
        owners = [self.state_of(states[owner]) for owner in frontier.owners.tolist()]
        deepest = np.array([owner.depth for owner in owners]) == frontier.depths + 1
        if not deepest.any():
            return super().expand(states, frontier)
        pairs = zip(owners, frontier.parents.tolist(), deepest.tolist(), strict=True)
        further = self._further(torch.stack([owner.head_output[parent] for owner, parent, last in pairs if last]))
        if deepest.all():
            return Guess(logits=further, short_list=self.short_list)
        others = cast(Tensor, super().expand(states, _part(frontier, ~deepest)).logits)
        return Guess(logits=_merged(deepest, further, others), short_list=self.short_list)

    def chain(self, states: Sequence[Running], counts: Sequence[int]) -> Follow:
        left = np.array(counts)
        follow = chain(self.lm, [self.state_of(state).slot for state in states], (left - 1).clip(0).tolist())
        head_output = torch.stack([self.state_of(state).head_output[0] for state in states])

        def step(tokens: Int[Tensor, " n"]) -> Float[Tensor, "n width"]:
            nonlocal head_output, left
            head_output, left = _rows(head_output, left > 0), left[left > 0] - 1
            deepest = left == 0
            further = self._further(_rows(head_output, deepest)) if deepest.any() else None
            if further is not None and deepest.all():
                return further
            head_output = _rows(head_output, ~deepest)
            extension = follow(_rows(tokens, ~deepest), self.next_feature(head_output))
            head_output, left = cast(Tensor, extension.features), left[~deepest]
            return extension.logits if further is None else _merged(deepest, further, extension.logits)

        return step

    @torch.inference_mode()
    def _further(self, head_output: Float[Tensor, "n parts"]) -> Float[Tensor, "n width"]:
        """The guesses of the token behind the next one."""
        head = cast(JakiroHead | TabularFusion, self.module)
        return head.logits(head.further(head_output))[..., : self.lm.vocab_size]


class JakiroObjective(EagleObjective):
    r"""EAGLE-1's losses for $h_1$, and in each pass the same losses for $h_2$, which guesses one token further.

    References:
        Huang et al. 2025. https://arxiv.org/abs/2502.06282
    """

    head: JakiroHead
    options: JakiroOptions

    def drafted(self, batch: TrainBatch, count: int) -> Iterator[Float[Tensor, "rows length parts"]]:
        """As `guesses`, but the last of several guesses is that of $h_2$."""
        head_output = None
        for head_output in self.guesses(batch, max(1, count - 1)):
            yield head_output
        if count > 1 and head_output is not None:
            yield self.head.further(head_output)

    def auxiliary_loss(
        self, batch: TrainBatch, hidden: Float[Tensor, "rows length parts"], number: int, places: LearntPositions
    ) -> Float[Tensor, ""]:
        """The distances of $h_1$ from the next features, and all losses of $h_2$."""
        further, behind = self.head.further(hidden), LearntPositions.of(batch, number + 1)
        values, _ = self._values(batch, further, number + 1, behind)
        contrast = values + super().auxiliary_loss(batch, further, number + 1, behind)
        return super().auxiliary_loss(batch, hidden, number, places) + self.options.contrast * contrast


@dataclass(frozen=True, kw_only=True)
class TrainedJakiro(TrainedEagle):
    """A Jakiro head on disk.

    Attributes:
        mixture: What is mixed for a guess: the experts' outputs (features), or their distributions by the gate's
            weights (gate) or by halves (half). By default what the config says.
    """

    mixture: Literal["config", "features", "gate", "half"] = "config"


def _rows(values: Tensor, chosen: Bool[np.ndarray, " n"]) -> Tensor:
    """Some of the rows of a tensor."""
    return values if chosen.all() else values[torch.from_numpy(np.flatnonzero(chosen)).to(values.device)]


def _part(frontier: Frontier, chosen: Bool[np.ndarray, " n"]) -> Frontier:
    return replace(
        frontier,
        owners=frontier.owners[chosen],
        nodes=frontier.nodes[chosen],
        parents=frontier.parents[chosen],
        depths=frontier.depths[chosen],
        tokens=_rows(frontier.tokens, chosen),
    )


def _merged(
    chosen: Bool[np.ndarray, " n"], these: Float[Tensor, "_ width"], others: Float[Tensor, "_ width"]
) -> Float[Tensor, "n width"]:
    """Rows of two tensors: `these` where chosen, `others` elsewhere."""
    order = np.argsort(np.concatenate([np.flatnonzero(chosen), np.flatnonzero(~chosen)]))
    return torch.cat([these, others.to(these.dtype)])[torch.from_numpy(order).to(these.device)]


def published(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether a checkpoint is one of Jakiro."""
    published = {"fc.weight", f"{EXPERTS[0]}gate.weight"} <= {name.removeprefix("model.") for name in names}
    return config.get(KIND) == NAME if KIND in config else published


SPEC = HeadSpec(
    name=NAME,
    head=JakiroHead,
    drafter=JakiroDrafter,
    published=published,
    trained=TrainedJakiro,
    options=JakiroOptions,
    objective=JakiroObjective,
    exports=Exports(instead="eagle"),
)
