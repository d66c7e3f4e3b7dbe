"""The walk down a tree, for all requests at once: current nodes, their children, and where each walk stops."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from outrider.core.dice import Dice, Draws, Purpose
from outrider.core.types import Draft, Verdict
from outrider.verifiers.protocol import upload


@dataclass(frozen=True, kw_only=True)
class Brood:
    """The children of some nodes, in drawing order, padded.

    Attributes:
        nodes: Packed index of each child; a repeated draw repeats its node; -1 is padding.
        slots: A number for each link that is unique within its request: its place among the request's links.
    """

    nodes: Int[np.ndarray, "n most"]
    slots: Int[np.ndarray, "n most"]

    @property
    def counts(self) -> Int[np.ndarray, " n"]:
        return (self.nodes >= 0).sum(1)


def brood(draft: Draft, requests: Int[np.ndarray, " n"], nodes: Int[np.ndarray, " n"]) -> Brood:
    """The children of one node of each of some requests."""
    first = draft.first_child[nodes]
    counts = draft.first_child[nodes + 1] - first
    places = first[:, None] + np.arange(int(counts.max(initial=0)))
    there = np.arange(places.shape[1]) < counts[:, None]
    found = draft.links[np.where(there, places, 0)] if len(draft.links) else np.zeros_like(places)
    own = places - draft.first_child[draft.offsets[requests]][:, None]
    return Brood(nodes=np.where(there, found, -1), slots=np.where(there, own, 0))


class Walk:
    """The walks of all requests; changes in place.

    Attributes:
        active: Requests that still walk.
        here: Packed index of the node that each request has reached.
    """

    def __init__(self, draft: Draft) -> None:
        count = draft.num_requests
        self.active: Int[np.ndarray, " active"] = np.arange(count)
        self.here: Int[np.ndarray, " requests"] = draft.offsets[:-1].copy()
        self._draft = draft
        self._paths = np.full((count, int(draft.depths.max(initial=0))), -1)
        self._depth = np.zeros(count, dtype=np.int64)
        self._stopped: list[Int[np.ndarray, " n"]] = []
        self._tokens: list[Int[Tensor, " n"]] = []

    @property
    def nodes(self) -> Int[np.ndarray, " active"]:
        """The nodes that the active requests have reached."""
        return self.here[self.active]

    def brood(self) -> Brood:
        """The children of the active requests' nodes."""
        return brood(self._draft, self.active, self.nodes)

    def go(self, children: Int[np.ndarray, " active"]) -> Bool[np.ndarray, " active"]:
        """Move to these children; a request with -1 stops. Returns which active requests stop; call `stop` next."""
        stopped = children < 0
        moving = self.active[~stopped]
        self.here[moving] = self._paths[moving, self._depth[moving]] = children[~stopped]
        self._depth[moving] += 1
        return stopped

    def stop(self, stopped: Bool[np.ndarray, " active"], tokens: Int[Tensor, " n"]) -> None:
        """End the walks of some of the active requests, each with the token that follows."""
        self._stopped.append(self.active[stopped])
        self._tokens.append(tokens)
        self.active = self.active[~stopped]

    def recover(self, stopped: Bool[np.ndarray, " active"], weights: Float[Tensor, "active vocab"], dice: Dice) -> None:
        """End the walks that stopped, each with a token drawn from its row of these weights."""
        if stopped.any():
            at = np.flatnonzero(stopped)
            draws = Draws(requests=self.active[at], slots=np.zeros_like(at), purpose=Purpose.RECOVER)
            self.stop(stopped, dice.pick(weights[upload(at, weights.device)], draws))

    def verdict(self) -> Verdict:
        """The verdict of all walks."""
        order = np.argsort(np.concatenate(self._stopped), kind="stable")
        tokens = torch.cat(self._tokens)
        return Verdict(
            paths=self._paths,
            num_accepted=self._depth,
            next_tokens=tokens if len(order) == 1 else tokens[upload(order, tokens.device)],
        )


def coins(
    walk: Walk, children: Brood, chances: Float[np.ndarray, "active most"], dice: Dice
) -> Int[np.ndarray, " active"]:
    """Try each active request's children in order, until one is accepted. Returns that child, or -1."""
    found = np.full(len(walk.active), -1)
    for k in range(chances.shape[1]):
        asked = np.flatnonzero((found < 0) & (children.nodes[:, k] >= 0))
        if len(asked):
            draws = Draws(requests=walk.active[asked], slots=children.slots[asked, k], purpose=Purpose.ACCEPT)
            asked = asked[dice.accept(chances[asked, k], draws)]
            found[asked] = children.nodes[asked, k]
    return found


def verdict_at(draft: Draft, accepted: Int[np.ndarray, " requests"], tokens: Int[Tensor, " requests"]) -> Verdict:
    """The paths that end at the accepted nodes."""
    paths = np.full((len(accepted), int(draft.depths.max(initial=0))), -1)
    here = accepted.copy()
    for depth in range(paths.shape[1], 0, -1):
        at = np.flatnonzero(draft.depths[here] == depth)
        paths[at, depth - 1] = here[at]
        here[at] = draft.parents[here[at]]
    return Verdict(paths=paths, num_accepted=draft.depths[accepted], next_tokens=tokens)
