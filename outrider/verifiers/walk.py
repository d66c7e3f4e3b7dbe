"""The walk down a tree, for all requests at once: current nodes, their children, and where each walk stops."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from outrider.core.dice import Dice, Draws, Purpose
from outrider.core.types import Draft, Verdict
from outrider.verifiers.protocol import Decision, upload


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

    def last(self) -> "Brood":
        """The last child of each node; -1 where there is none."""
        if not self.nodes.shape[1]:
            none = np.full((len(self.nodes), 1), -1)
            return Brood(nodes=none, slots=np.zeros_like(none))
        final = np.maximum(self.counts - 1, 0)[:, None]
        return Brood(nodes=np.take_along_axis(self.nodes, final, 1), slots=np.take_along_axis(self.slots, final, 1))

    def part(self, where: Int[np.ndarray, " m"]) -> "Brood":
        """The children of some of the nodes."""
        return Brood(nodes=self.nodes[where], slots=self.slots[where])


def brood(draft: Draft, requests: Int[np.ndarray, " n"], nodes: Int[np.ndarray, " n"]) -> Brood:
    """The children of one node of each of some requests."""
    first = draft.first_child[nodes]
    counts = draft.first_child[nodes + 1] - first
    places = first[:, None] + np.arange(int(counts.max(initial=0)))
    there = np.arange(places.shape[1]) < counts[:, None]
    links = draft.links[np.where(there, places, 0)] if len(draft.links) else np.zeros_like(places)
    slots = places - draft.first_child[draft.offsets[requests]][:, None]
    return Brood(nodes=np.where(there, links, -1), slots=np.where(there, slots, 0))


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
    accepted = np.full(len(walk.active), -1)
    for k in range(chances.shape[1]):
        tried = np.flatnonzero((accepted < 0) & (children.nodes[:, k] >= 0))
        if len(tried):
            draws = Draws(requests=walk.active[tried], slots=children.slots[tried, k], purpose=Purpose.ACCEPT)
            tried = tried[dice.accept(chances[tried, k], draws)]
            accepted[tried] = children.nodes[tried, k]
    return accepted


@dataclass(frozen=True, kw_only=True)
class JudgedNodes:
    """Nodes with children, judged before it is known which of them a walk reaches.

    Attributes:
        nodes: Packed index of each, ascending.
        chances: Probability of each child when it is tried, in drawing order; anything for padding.
        after: Weights of the token that follows if no child is accepted.
    """

    nodes: Int[np.ndarray, " n"]
    chances: Float[Tensor, "n most"]
    after: Float[Tensor, "n vocab"]


def inner_nodes(draft: Draft) -> Int[np.ndarray, " n"]:
    """The nodes with children."""
    return np.flatnonzero(np.diff(draft.first_child))


def owners(draft: Draft) -> Int[np.ndarray, " nodes"]:
    """The request of each node."""
    return np.repeat(np.arange(draft.num_requests), np.diff(draft.offsets))


def decided(draft: Draft, target_rows: Float[Tensor, "nodes vocab"], judged: JudgedNodes, dice: Dice) -> Decision:
    """Throw all coins at once, and follow from each root the children that are accepted. Nothing waits for the device.

    The coins and draws are those of a walk that throws them in turn.
    """
    landed = _tossed(draft, judged, dice)
    last = followed(draft, judged.nodes, landed)
    weights = target_rows.index_select(0, last)
    if len(judged.nodes):
        place = np.full(len(draft.parents), -1)
        place[judged.nodes] = np.arange(len(judged.nodes))
        at = upload(place, weights.device)[last]
        weights = torch.where((at >= 0)[:, None], judged.after.index_select(0, at.clamp_min(0)), weights)
    count = draft.num_requests
    draws = Draws(requests=np.arange(count), slots=np.zeros(count, dtype=np.int64), purpose=Purpose.RECOVER)
    return Decision(last=last, next_tokens=dice.pick(weights, draws))


def _tossed(draft: Draft, judged: JudgedNodes, dice: Dice) -> Int[Tensor, " n"]:
    """For each judged node the child that is accepted, or the node itself."""
    requests = owners(draft)[judged.nodes]
    children = brood(draft, requests, judged.nodes)
    draws = Draws(
        requests=np.repeat(requests, children.nodes.shape[1]), slots=children.slots.ravel(), purpose=Purpose.ACCEPT
    )
    chances = judged.chances
    if (children.nodes < 0).any():
        chances = chances * upload(children.nodes >= 0, chances.device)
    misses = ~dice.toss(chances, draws)
    table = upload(np.concatenate([children.nodes, judged.nodes[:, None]], 1), misses.device)
    return table.gather(1, misses.cumprod(1).sum(1, keepdim=True)).squeeze(1)


def child_with(draft: Draft, nodes: Int[np.ndarray, " n"], tokens: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """For each node the first of its children that holds this token, or the node itself."""
    children = brood(draft, owners(draft)[nodes], nodes).nodes
    table = upload(np.concatenate([children, nodes[:, None]], 1), tokens.device)
    hits = (draft.tokens[table.clamp_min(0)] == tokens[:, None]) & (table >= 0)
    # The padding behind the children is the node itself, which stands for a hit.
    hits[:, -1] = True
    return table.gather(1, hits.to(torch.uint8).argmax(1, keepdim=True)).squeeze(1)


def followed(draft: Draft, nodes: Int[np.ndarray, " n"], onward: Int[Tensor, " n"]) -> Int[Tensor, " requests"]:
    """Where each request ends that starts at its root and goes on from node to node.

    Args:
        nodes: Nodes with children.
        onward: The child to go to from each of them, or the node itself, to stay there.
    """
    last = upload(draft.offsets[:-1], onward.device)
    if len(nodes):
        everything = np.arange(len(draft.parents))
        links = upload(everything, onward.device).index_copy(0, upload(nodes, onward.device), onward)
        for _ in range(int(draft.depths.max(initial=0))):
            last = links[last]
    return last
