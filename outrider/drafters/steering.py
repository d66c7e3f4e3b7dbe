r"""Steering of a pretrained draft model by the target's hidden states (SD², Berdoz et al. 2025), and its files."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.utils import cached_file

from outrider.core import files
from outrider.core.option import check, option
from outrider.core.types import InputError
from outrider.lm.hf.checkpoint import build_module, file_tensors, json_object, size, whole_numbers

CONFIG, WEIGHTS = "steering.json", "steering.safetensors"
"""The files of a steering, beside those of its draft model."""
FORMAT = "outrider-steering-1"
CONVENTION = "tap k enters decoder layer k; the last tap leaves the last layer, before the final norm"
"""Which hidden states the taps of a file are; other projects number the outputs of layers, or normed states."""


@dataclass(frozen=True, kw_only=True)
class SteeringConfig:
    """The sizes of a steering.

    Attributes:
        taps: The target's hidden states that it reads, the highest first.
        target_layers: The target's decoder layers.
        target_size: Width of the target's hidden states.
        widths: Width of the up projection in each of the draft model's layers.
        rank: Rank of the matrix from hidden states to the draft model's layers; None: a full matrix.

    Raises:
        InputError: A size makes no sense.
    """

    taps: tuple[int, ...]
    target_layers: int
    target_size: int
    widths: tuple[int, ...]
    rank: int | None = option(None, least=1)

    def __post_init__(self) -> None:
        check(self)
        if not self.taps or len(set(self.taps)) < len(self.taps):
            raise InputError(f"taps must be one or more different hidden states, got {list(self.taps)}")
        if any(not 0 <= tap <= self.target_layers for tap in self.taps):
            raise InputError(
                f"taps must be in 0..{self.target_layers}, the number of the target's layers, got {list(self.taps)}"
            )


def usual_taps(num_layers: int) -> tuple[int, ...]:
    """A high, a middle and a low hidden state of a target; fewer where these are the same.

    Example:
        >>> usual_taps(32), usual_taps(8), usual_taps(2)
        ((30, 17, 4), (6, 5, 1), (2, 1))
    """
    low = max(1, num_layers // 8)
    middle = min(num_layers, num_layers // 2 + 1)
    return tuple(sorted({low, middle, max(middle, num_layers - 2)}, reverse=True))


class Steering(nn.Module):
    r"""Vectors for the draft model's feed-forward layers, from the target's hidden states at one position.

    With the tapped states $s_1 \ldots s_n$ of the position, side by side,

    $g = W_g [s_1; \ldots; s_n], \qquad \delta = P\,\mathrm{LayerNorm}(g)$,

    and $\delta_l$ is the part of $\delta$ that layer $l$ adds to its up projection:
    $W_{down}(act(W_{gate} x) \cdot (W_{up} x + \delta_l))$. At the start $W_g$ sums the states and $P = 0$, so the
    steered draft model is the draft model. With a rank $r$, $P = B A$, where $A$ has $r$ rows and $B = 0$ at first.

    References:
        Berdoz et al. 2025. https://arxiv.org/abs/2511.09844
    """

    def __init__(self, config: SteeringConfig) -> None:
        super().__init__()
        self.config = config
        size, width = config.target_size, sum(config.widths)
        self.gather = nn.Linear(len(config.taps) * size, size)
        self.norm = nn.LayerNorm(size)
        self.narrow = nn.Identity() if config.rank is None else nn.Linear(size, config.rank, bias=False)
        self.inject = nn.Linear(config.rank or size, width, bias=False)
        with torch.no_grad():
            self.gather.weight.copy_(torch.eye(size).repeat(1, len(config.taps)))
            self.gather.bias.zero_()
            self.inject.weight.zero_()

    def concatenate(self, taps: Mapping[int, Float[Tensor, "*batch hidden"]]) -> Float[Tensor, "*batch all"]:
        """The tapped states of each position side by side, as the module reads them."""
        return torch.cat([taps[tap] for tap in self.config.taps], -1)

    def project(self, states: Float[Tensor, "*batch all"]) -> Float[Tensor, "*batch inner"]:
        """What the vectors of all layers are made of: $\\mathrm{LayerNorm}(g)$, or $A$ times it."""
        return self.narrow(self.norm(self.gather(states)))

    def layers(self, inner: Float[Tensor, "*batch inner"]) -> Callable[[int], Float[Tensor, "*batch width"]]:
        """The vectors of a layer by its number, each computed when it is asked for."""
        weights = self.inject.weight.split(list(self.config.widths))
        return lambda layer: nn.functional.linear(inner, weights[layer])

    def forward(self, states: Float[Tensor, "*batch all"]) -> Float[Tensor, "*batch widths"]:
        """The vectors of all layers, side by side."""
        return self.inject(self.project(states))


def write_steering(steering: Steering, folder: Path, dtype: torch.dtype) -> None:
    """Write a steering's two files into a folder, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    described = {"format": FORMAT, "convention": CONVENTION, **dataclasses.asdict(steering.config)}
    tensors = {name: value.detach().to("cpu", dtype).contiguous() for name, value in steering.state_dict().items()}
    with files.replaced(folder / WEIGHTS) as fresh:
        save_file(tensors, fresh)
    files.replace(folder / CONFIG, (json.dumps(described, indent=2) + "\n").encode())


def read_steering(path: str, *, revision: str | None = None) -> Steering:
    """The steering in a directory or at a hub id.

    Raises:
        InputError: There is none, or it is damaged or of another kind.
    """
    config = _config(path, _file(path, CONFIG, revision))
    tensors = file_tensors(_file(path, WEIGHTS, revision), path)
    return build_module(lambda: Steering(config), tensors, f"{WEIGHTS} of {path}").eval()


def _config(path: str, file: str) -> SteeringConfig:
    config = json_object(file, CONFIG, path)
    kind, convention = config.get("format"), config.get("convention")
    if kind != FORMAT or convention != CONVENTION:
        raise InputError(
            f"{CONFIG} of {path} has the format {kind!r} with the convention {convention!r}, and this version reads "
            f"{FORMAT!r} with {CONVENTION!r}"
        )
    return SteeringConfig(
        taps=whole_numbers(config.get("taps"), "taps", path, file=CONFIG),
        target_layers=size(config, "target_layers", path, file=CONFIG),
        target_size=size(config, "target_size", path, file=CONFIG),
        widths=whole_numbers(config.get("widths"), "widths", path, file=CONFIG),
        rank=None if config.get("rank") is None else size(config, "rank", path, file=CONFIG),
    )


def _file(path: str, name: str, revision: str | None) -> str:
    """A local copy of a file in a directory or at a hub id."""
    try:
        file = cached_file(path, name, revision=revision or "main")
    except (OSError, ValueError) as error:
        raise InputError(
            f"there is no steering in {path}: it has no {name}; `outrider train steer` writes one beside a draft model"
        ) from error
    return str(file)
