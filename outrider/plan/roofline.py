"""Costs of steps on a machine that is not here: estimated from its memory bandwidth and its arithmetic."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from outrider.core.inputs import unknown
from outrider.decoding.protocol import Parts
from outrider.drafters.protocol import Drafter
from outrider.lengths.costs import CostTable, StepCost
from outrider.lm.weights.plain import num_packed

BYTES = 2
"""Bytes of a weight and of a cached key or value: bfloat16."""
OF_BANDWIDTH, OF_FLOPS = 0.7, 0.5
"""Shares of a machine's stated bandwidth and arithmetic that forwards are assumed to reach."""
LAYER, REST, LOOK_UP = 10e-6, 200e-6, 20e-6
"""Seconds that are assumed for launching a layer, for the rest of a step, and for looking up one draft token."""
REQUESTS, LONGEST = (1, 2, 4, 8, 16, 32, 64), 8
"""Numbers of requests and the longest draft that the table holds."""
NEAR, FAR = 64, 4096
"""Contexts of its rows."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """A machine by its data sheet.

    Attributes:
        bandwidth: Bytes per second from memory.
        flops: Operations per second in bfloat16, dense.
    """

    bandwidth: float
    flops: float


DEVICES = {
    "a100": Device(bandwidth=2.04e12, flops=312e12),
    "h100": Device(bandwidth=3.35e12, flops=989e12),
    "h200": Device(bandwidth=4.8e12, flops=989e12),
    "l40s": Device(bandwidth=0.864e12, flops=362e12),
    "mi300x": Device(bandwidth=5.3e12, flops=1307e12),
    "rtx4090": Device(bandwidth=1.008e12, flops=165e12),
}
"""80 GB and SXM models where there are several."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The size of a model, as far as it decides the time of a forward.

    Attributes:
        dense: Weights that every token needs.
        experts: Weights of all experts together.
        num_experts: Experts of a layer; 0 without experts.
        per_token: Experts that a token visits.
        layers: Number of layers.
        kept: Numbers per token of context that attention keeps and reads.
    """

    dense: int
    experts: int = 0
    num_experts: int = 0
    per_token: int = 0
    layers: int = 0
    kept: int = 0

    @classmethod
    def of(cls, modules: Mapping[str, nn.Module]) -> "Weights":
        """The size of modules, by their parameters and by the config of the first that has one."""
        named = {name: each for module in modules.values() for name, each in module.named_parameters()}
        experts = sum(each.numel() for name, each in named.items() if "experts." in name and "shared" not in name)
        whole = sum(each.numel() for each in named.values()) + sum(map(num_packed, modules.values()))
        config = next((module.config for module in modules.values() if hasattr(module, "config")), None)

        def read(*names: str) -> int:
            return next((int(value) for name in names if isinstance(value := getattr(config, name, None), int)), 0)

        heads, hidden = read("num_attention_heads"), read("hidden_size")
        per_head = read("head_dim") or (hidden // heads if heads else 0)
        layers = read("num_hidden_layers", "n_layer")
        return cls(
            dense=whole - experts,
            experts=experts,
            num_experts=read("num_local_experts", "num_experts", "n_routed_experts") if experts else 0,
            per_token=read("num_experts_per_tok") if experts else 0,
            layers=layers,
            kept=2 * layers * (read("num_key_value_heads") or heads) * per_head,
        )

    def touched(self, tokens: int) -> float:
        r"""Share of the experts that some of so many tokens visit, if they choose independently.

        $1 - (1 - k/E)^N$. Tokens of one text choose more alike, so that this is an upper bound.

        Example:
            >>> Weights(dense=1, experts=8, num_experts=4, per_token=1).touched(2)
            0.4375
        """
        if not self.num_experts:
            return 0.0
        return 1 - (1 - self.per_token / self.num_experts) ** tokens

    def seconds(self, device: Device, tokens: int) -> float:
        """Seconds of a forward of so many tokens: reading the weights, or computing, whichever takes longer."""
        read = BYTES * (self.dense + self.experts * self.touched(tokens)) / (OF_BANDWIDTH * device.bandwidth)
        active = self.dense + (self.experts * self.per_token / self.num_experts if self.num_experts else 0)
        computed = 2 * active * tokens / (OF_FLOPS * device.flops)
        return LAYER * max(1, self.layers) + max(read, computed)


def device_of(name: str) -> Device:
    """The machine of a name. Raises InputError for another one, and lists all."""
    if name.lower() not in DEVICES:
        raise unknown("device", name, DEVICES)
    return DEVICES[name.lower()]


def estimated(parts: Parts, drafter: Drafter, device: Device) -> CostTable:
    """The costs of steps on a machine, from the sizes of the models alone. It holds for one machine of that kind."""
    target, draft = Weights.of(parts.target.modules), Weights.of(drafter.modules)
    rows = [_row(target, draft, drafter, device, b, n, NEAR) for b in REQUESTS for n in range(LONGEST + 1)]
    rows += [_row(target, draft, drafter, device, 1, n, FAR) for n in (0, LONGEST)]
    return CostTable(rows=tuple(rows), kept=True)


def _row(
    target: Weights, draft: Weights, drafter: Drafter, device: Device, requests: int, length: int, context: int
) -> StepCost:
    cached = BYTES * requests * context / (OF_BANDWIDTH * device.bandwidth)
    if not draft.dense:
        spent = LOOK_UP * requests * length
    else:
        calls = min(length, 1) if drafter.rows == "marginal" else length
        spent = calls * (draft.seconds(device, requests) + cached * draft.kept)
    return StepCost(
        requests=requests,
        length=length,
        context=context,
        target=target.seconds(device, requests * (1 + length)) + cached * target.kept,
        drafter=spent,
        rest=REST,
    )
