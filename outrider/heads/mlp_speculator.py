r"""MLP speculators: a recurrent state that reads one draft token after another (Wertheimer et al. 2024)."""

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import gelu

from outrider.core.types import InputError
from outrider.drafters.exports import Exports
from outrider.heads.head import HeadFiles, TrainedHead
from outrider.heads.objective import HeadContext
from outrider.heads.spec import HeadSpec
from outrider.heads.trunks.last_state import randomise
from outrider.heads.trunks.sequential import SequentialDrafter, SequentialHead
from outrider.lm.hf.checkpoint import MOST_COUNT, TARGET, Checkpoint, TargetShape, build_module, size
from outrider.lm.tabular import TABLE_FEATURES
from outrider.lm.target_info import TargetInfo

NAME = "mlp_speculator"
"""The `model_type` of such a checkpoint."""
EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class MLPSpeculatorConfig:
    """The sizes of an MLP speculator, under the names of its config.

    Attributes:
        vocab_size: Width of the logits.
        emb_dim: Width of the target's hidden states.
        inner_dim: Width of the state.
        n_predict: How many tokens it guesses.
        tie_weights: Whether all depths share their weights, except for the first projection.
        scale_input: Whether the hidden state is normed first.

    Raises:
        InputError: A number is below 1.
    """

    vocab_size: int
    emb_dim: int
    inner_dim: int
    n_predict: int = 3
    tie_weights: bool = False
    scale_input: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "emb_dim", "inner_dim", "n_predict"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} of an MLP speculator must be >= 1, got {getattr(self, name)}")


class ScaledNorm(nn.Module):
    """A root-mean-square norm with a scale and a shift."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, states: Float[Tensor, "*batch size"]) -> Float[Tensor, "*batch size"]:
        return self.weight * normed(states) + self.bias


class MLPSpeculator(SequentialHead):
    r"""With $a = 2^{-1/(2n)}$ for n guesses and $b = \sqrt{(1 - a^2) d / 2}$ for a state of width d,

    $s_{i+1} = \mathrm{GELU}(\mathrm{LN}_i(a\,P_i s_i + b\,E_i(y_i))), \qquad \text{logits}_i = H_i s_{i+1}$,

    where $s_0$ is the target's normed last hidden state, $y_0$ the anchor and $y_i$ the draft token at depth i.

    The names of its tensors are those of its checkpoints.

    References:
        Wertheimer et al. 2024. https://arxiv.org/abs/2404.19124
    """

    def __init__(self, config: MLPSpeculatorConfig) -> None:
        super().__init__()
        self.config, self.max_depth = config, config.n_predict
        inner, depths = config.inner_dim, range(config.n_predict)
        self.emb = nn.ModuleList(nn.Embedding(config.vocab_size, inner) for _ in depths)
        self.proj = nn.ModuleList(nn.Linear(inner if i else config.emb_dim, inner, bias=False) for i in depths)
        self.ln = nn.ModuleList(ScaledNorm(inner) for _ in depths)
        self.head = nn.ModuleList(nn.Linear(inner, config.vocab_size, bias=False) for _ in depths)
        self.kept = 0.5 ** (0.5 / config.n_predict)
        self.added = math.sqrt((1 - self.kept**2) * inner / 2)

    @classmethod
    def load(cls, checkpoint: Checkpoint, target: TargetInfo, trained: TrainedHead) -> "MLPSpeculator":
        path, raw_config = checkpoint.path, checkpoint.config
        if not published(raw_config, ()):
            raise InputError(f"{path} holds no MLP speculator: the model_type of its config is not {NAME!r}")
        width = size(raw_config, "emb_dim" if raw_config.get("emb_dim") else "hidden_size", path)
        config = MLPSpeculatorConfig(
            vocab_size=size(raw_config, "vocab_size", path),
            emb_dim=width,
            inner_dim=size(raw_config, "inner_dim", path, least=0, default=width) or width,
            n_predict=size(raw_config, "n_predict", path, most=MOST_COUNT),
            tie_weights=bool(raw_config.get("tie_weights")),
            scale_input=bool(raw_config.get("scale_input")),
        )
        tensors = {name.removeprefix("speculator."): tensor for name, tensor in checkpoint.tensors().items()}
        head = build_module(lambda: cls(config), _shared(tensors, config) if config.tie_weights else tensors, path)
        trained.check_target(checkpoint.target, width, target)
        trained.check_vocabulary(config.vocab_size, target)
        return head

    @classmethod
    def new(cls, options: Any, context: HeadContext) -> "MLPSpeculator":
        info = context.info
        config = MLPSpeculatorConfig(
            vocab_size=info.vocab_size,
            emb_dim=info.hidden_size,
            inner_dim=info.hidden_size,
            n_predict=context.depth,
        )
        return cls(config)

    def record(self, target: TargetShape, dtype: torch.dtype, name: str) -> HeadFiles:
        """As its authors write it. Weights that all depths share are written once."""
        config, tied = self.config, self.config.tie_weights
        described = {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": NAME,
            **asdict(config),
            "top_k_tokens_per_head": [1] * config.n_predict,
            "n_candidates": 1,
            "torch_dtype": str(dtype).removeprefix("torch."),
            TARGET: target.record(),
        }
        tensors = {
            f"speculator.{name}": tensor
            for name, tensor in self.state_dict().items()
            if not tied or int(name.split(".")[1]) <= int(name.startswith("proj"))
        }
        return described, tensors

    @property
    def weight(self) -> Tensor:
        return self.emb[0].weight  # type: ignore[return-value]

    def begin(self, hidden: Float[Tensor, "n hidden"]) -> Float[Tensor, "n state"]:
        return normed(hidden) / math.sqrt(2) if self.config.scale_input else hidden

    def read(self, state: Float[Tensor, "n before"], tokens: Int[Tensor, " n"], depth: int) -> Float[Tensor, "n state"]:
        moved = self.kept * self.proj[depth](state) + self.added * self.emb[depth](tokens)
        return gelu(self.ln[depth](moved))

    def logits(self, state: Float[Tensor, "n state"], depth: int) -> Float[Tensor, "n vocab"]:
        logits: Tensor = self.head[depth](state)
        return logits

    def on_tables(self, vocab_size: int, seed: int) -> "MLPSpeculator":
        config = MLPSpeculatorConfig(
            vocab_size=vocab_size, emb_dim=TABLE_FEATURES, inner_dim=4, n_predict=self.max_depth, scale_input=True
        )
        head = MLPSpeculator(config).double().eval()
        randomise(head, seed)
        return head


def normed(states: Float[Tensor, "*batch size"]) -> Float[Tensor, "*batch size"]:
    """The states with a root mean square of 1."""
    return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + EPS)


def published(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether a checkpoint is an MLP speculator."""
    return config.get("model_type") == NAME


def _shared(tensors: Mapping[str, Tensor], config: MLPSpeculatorConfig) -> dict[str, Tensor]:
    """The tensors of all depths, where a file may have those of the first alone."""
    shared = dict(tensors)
    for i in range(1, config.n_predict):
        for name in ("emb.{}.weight", "head.{}.weight", "ln.{}.weight", "ln.{}.bias", "proj.{}.weight"):
            first = name.format(1 if name.startswith("proj") else 0)
            if first in shared:
                shared[name.format(i)] = shared[first]
    return shared


SPEC = HeadSpec(
    name=NAME,
    head=MLPSpeculator,
    drafter=SequentialDrafter,
    published=published,
    exports=Exports(vllm="mlp_speculator", draws=False, instead="eagle3"),
)
