"""A mixture-of-experts model with fewer experts: merged (UNCURL), or the most used ones, or the loudest ones."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from outrider.core.inputs import unknown
from outrider.core.types import InputError
from outrider.surgery.clusters import spectral_clusters
from outrider.surgery.merging import Expert, merged, weights
from outrider.surgery.mixture import Mixture, find_mixtures
from outrider.surgery.rebuilt import rebuilt
from outrider.surgery.routing import Routing, watch_routing
from outrider.surgery.texts import Progress, Texts

METHODS = ("uncurl", "frequency", "reap")
"""How experts are made fewer."""
_COUNTS = ("num_experts", "num_local_experts")
_CHOSEN = "num_experts_per_tok"


@dataclass(frozen=True, kw_only=True)
class PrunedExperts:
    """A model with fewer experts.

    Attributes:
        model: The model.
        origins: For each expert layer and each new expert, the old experts that it is made of.
        usage: For each expert layer and each old expert, how often the text used it.
        num_tokens: Number of tokens of the text.
    """

    model: PreTrainedModel
    origins: dict[str, list[list[int]]]
    usage: dict[str, list[int]]
    num_tokens: int


def prune_experts(
    model: PreTrainedModel,
    texts: Texts,
    num_experts: int,
    method: str = "uncurl",
    *,
    experts_per_token: int | None = None,
    progress: Progress | None = None,
) -> PrunedExperts:
    r"""A copy of a mixture-of-experts model that has fewer experts in each layer, by what a text needs.

    `uncurl` parts the experts of a layer into clusters by the correlation of their router logits, and merges each
    cluster into one expert by `merged`. The merged expert's row of the router is the mean of the members' rows,
    weighted by usage. `frequency` keeps the experts that the text uses most. `reap` keeps those with the largest mean
    of $g_e(x)\,\lVert f_e(x)\rVert$ over the tokens that use them.

    A router has no bias, so the gate of a merged expert cannot hold the sum of its members' gates. If a router takes
    one expert per token and its gate is normalised to 1, equal experts merge without a change of the output. Otherwise
    the gates of a merged expert and of its neighbours change a little, and training repairs this. A token whose chosen
    experts all fall into one cluster uses a further expert in the place of the others.

    With as many experts as before, the logits stay the same, bit for bit.

    Args:
        model: Is read and stays as it is.
        texts: Of the task that the draft model is for, as token ids.
        num_experts: Experts that each layer keeps.
        experts_per_token: Experts that each token uses; None keeps the number.

    Raises:
        InputError: The model has no experts, or of a kind unknown here; the texts are empty; there are fewer experts
            than asked for, or more are used per token; the method is unknown.

    References:
        Muzio, Sun and He 2024, UNCURL. https://arxiv.org/abs/2409.01483
        Lasby et al. 2025, REAP. https://arxiv.org/abs/2510.13999
    """
    if method not in METHODS:
        raise unknown("method of pruning experts", method, METHODS)
    mixtures = find_mixtures(model)
    config = _config(model, mixtures, num_experts, experts_per_token)
    routings = watch_routing(model, mixtures, texts, norms=method == "reap", progress=progress)
    state = dict(model.state_dict())
    origins = {}
    for mixture, routing in zip(mixtures, routings, strict=True):
        groups = _groups(routing, num_experts, method)
        origins[mixture.name] = groups
        state |= _weights(model, mixture, groups, routing)
    return PrunedExperts(
        model=rebuilt(model, config, state),
        origins=origins,
        usage={m.name: r.usage.tolist() for m, r in zip(mixtures, routings, strict=True)},
        num_tokens=routings[0].num_tokens,
    )


def check_experts(config: PreTrainedConfig, num_experts: int, experts_per_token: int | None = None) -> None:
    """Raise InputError where `prune_experts` would refuse these numbers or this kind of model: no weights are read."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).eval()
    _config(model, find_mixtures(model), num_experts, experts_per_token)


def _config(
    model: PreTrainedModel, mixtures: Sequence[Mixture], num_experts: int, experts_per_token: int | None
) -> PreTrainedConfig:
    """The config with the new numbers. Raises InputError for numbers that do not fit."""
    config = copy.deepcopy(model.config)
    text = config.get_text_config(decoder=True)
    before, chosen = mixtures[0].num_experts, getattr(text, _CHOSEN, None)
    names = [name for name in _COUNTS if getattr(text, name, None) == before]
    if not names or chosen is None or any(m.num_experts != before for m in mixtures):
        raise InputError(f"the config of {config.model_type} does not say how many experts there are in each layer")
    wanted = chosen if experts_per_token is None else experts_per_token
    if not 1 <= wanted <= chosen:
        raise InputError(f"experts_per_token must be in 1..{chosen}, the target's number, got {wanted}")
    if num_experts > before:
        raise InputError(f"num_experts must be <= {before}, the number of experts in each layer, got {num_experts}")
    if num_experts < wanted:
        raise InputError(
            f"num_experts must be >= {wanted}, the number of experts that each token uses, got {num_experts}; "
            "lower experts_per_token too, or keep more experts"
        )
    for name in names:
        setattr(text, name, num_experts)
    setattr(text, _CHOSEN, wanted)
    return config


def _groups(routing: Routing, count: int, method: str) -> list[list[int]]:
    """The old experts of each new one. Experts that tie stay in their order."""
    if method == "uncurl":
        return spectral_clusters(routing.correlation.clip(min=0), count, first=int(routing.usage.argmax()))
    score = routing.usage if method == "frequency" else routing.norms
    kept = np.argsort(-score, kind="stable")[:count]
    return [[expert] for expert in sorted(kept.tolist())]


@torch.no_grad()
def _weights(
    model: PreTrainedModel, mixture: Mixture, groups: Sequence[Sequence[int]], routing: Routing
) -> dict[str, Tensor]:
    """The new weights of one layer, by their names in the model. Means are taken in float32 at least."""
    names = {id(weight): name for name, weight in model.named_parameters()}
    old = {"router": mixture.rows, "gate_up": mixture.gate_up, "down": mixture.down}
    wide = torch.float64 if old["down"].dtype == torch.float64 else torch.float32
    fresh: dict[str, list[Tensor]] = {part: [] for part in old}
    for group in groups:
        usage = [int(routing.usage[expert]) for expert in group]
        experts = [Expert(gate_up=old["gate_up"][e].to(wide), down=old["down"][e].to(wide)) for e in group]
        one = merged(experts, usage)
        rows = [share * old["router"][e].to(wide) for e, share in zip(group, weights(usage), strict=True)]
        fresh["router"].append(torch.stack(rows).sum(0))
        fresh["gate_up"].append(one.gate_up)
        fresh["down"].append(one.down)
    return {names[id(old[part])]: torch.stack(rows).to(old[part].dtype) for part, rows in fresh.items()}
