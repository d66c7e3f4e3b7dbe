"""Jakiro: EAGLE with two small experts, whose contrast guesses the last token without a forward (Huang et al. 2025)."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from outrider.core.types import Frontier, Guess, Running
from outrider.drafters.eagle import EagleKinPath
from outrider.drafters.feature_head import FeatureHeadDrafter
from outrider.drafters.own_features import HeadState
from outrider.drafters.slotted import state_of
from outrider.heads.eagle import EagleFile
from outrider.heads.jakiro import JakiroFile, JakiroHead, is_jakiro
from outrider.lm.slots.chain import chain
from outrider.lm.tabular import TabularFusion
from outrider.lm.target_info import TargetInfo
from outrider.trees.chained import Follow


@dataclass(kw_only=True)
class JakiroState(HeadState):
    """One request's slot and features; changes in place.

    Attributes:
        depth: Deepest node of its draft.
    """

    depth: int = 0


@dataclass(frozen=True, kw_only=True)
class JakiroDrafter(FeatureHeadDrafter):
    """Guess by a head that can guess one token further. Drafts of depth d take d - 1 forwards, d above 1: the deepest
    guesses are made from what was output at the parents of their nodes. They do not depend on the nodes' tokens.

    References:
        Huang et al. 2025. https://arxiv.org/abs/2502.06282
    """

    trainer: ClassVar[str | None] = "jakiro"
    state: ClassVar[type[HeadState]] = JakiroState

    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess:
        for state, depth in zip(states, depths, strict=True):
            _own(state).depth = depth
        return super().begin(states, depths)

    def expand(self, states: Sequence[Running], frontier: Frontier) -> Guess:
        owners = [_own(states[owner]) for owner in frontier.owners.tolist()]
        deepest = np.array([own.depth for own in owners]) == frontier.depths + 1
        if not deepest.any():
            return super().expand(states, frontier)
        pairs = zip(owners, frontier.parents.tolist(), deepest.tolist(), strict=True)
        further = self._further(torch.stack([own.head_output[parent] for own, parent, last in pairs if last]))
        if deepest.all():
            return Guess(logits=further, short_list=self.short_list)
        others = cast(Tensor, super().expand(states, _part(frontier, ~deepest)).logits)
        return Guess(logits=_merged(deepest, further, others), short_list=self.short_list)

    def chain(self, states: Sequence[Running], counts: Sequence[int]) -> Follow:
        left = np.array(counts)
        follow = chain(self.lm, [_own(state).slot for state in states], (left - 1).clip(0).tolist())
        head_output = torch.stack([_own(state).head_output[0] for state in states])

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


@dataclass(frozen=True, kw_only=True)
class JakiroPath(EagleKinPath):
    """A Jakiro head before it is bound to a target: `jakiro:path=...`.

    Attributes:
        mixture: What is mixed for a guess: the experts' outputs (features), or their distributions by the gate's
            weights (gate) or by halves (half). By default what the config says.
    """

    file: ClassVar[type[EagleFile]] = JakiroFile

    mixture: Literal["config", "features", "gate", "half"] = "config"

    @classmethod
    def recognises(cls, config: Mapping[str, Any], names: Collection[str]) -> bool:
        return is_jakiro(config, names)

    def bind(self, target_info: TargetInfo) -> JakiroDrafter:
        """Load the head."""
        drafter = JakiroDrafter(**self.read(target_info))
        if self.mixture != "config":
            cast(JakiroHead, drafter.module).mixture = self.mixture
        return drafter


def _own(state: Running) -> JakiroState:
    return state_of(JakiroState, state.drafter_state)


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
