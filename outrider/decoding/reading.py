"""A draft and the target's results on it, from one forward. All arithmetic of offsets is here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.constraints.masks import batch_masks, is_masked
from outrider.core.sampling import RowRule, log_probs, rows_at_once, to_rows, without_law
from outrider.core.texts import Before, climbed, text_of
from outrider.core.types import Draft, Running, Verdict
from outrider.decoding.protocol import NoDistribution
from outrider.drafters.protocol import Observed
from outrider.lm.protocol import LM, Extension, Segment
from outrider.lm.slots.batch import upload
from outrider.verifiers.protocol import Decision


@dataclass(frozen=True, kw_only=True)
class Survivor:
    """The accepted path of one request, on the host.

    Attributes:
        path: Packed indices of the accepted nodes, minus the packed index of the request's root.
        tokens: The tokens of the path, and the recovered or bonus token.
    """

    path: list[int]
    tokens: list[int]


@dataclass(frozen=True, kw_only=True)
class TargetReading:
    """A draft, and the target's results from one forward over it.

    The forward also runs committed tokens before a root that were not in the target's cache yet.

    Attributes:
        draft: The draft.
        behind: Per request, the committed tokens before its root that the same forward ran.
        extension: Logits of the draft's nodes. Hidden states of these nodes and of the tokens in `behind`.
    """

    draft: Draft
    behind: Sequence[Sequence[int]]
    extension: Extension

    @classmethod
    def of(cls, target: LM, draft: Draft, states: Sequence[Running], taps: Sequence[int] = ()) -> "TargetReading":
        """Run the target on a draft, and on committed tokens before a root that its cache lacks."""
        behind = [state.tokens[target.length(state.slot) : -1] for state in states]
        segments = [_segment(draft, i, state.slot, behind[i]) for i, state in enumerate(states)]
        return cls(draft=draft, behind=behind, extension=target.extend(segments, taps=taps))

    def rows(self, states: Sequence[Running], masks: Int[Tensor, "nodes words"] | None) -> Float[Tensor, "nodes vocab"]:
        """The target's distribution after each node, under its request's settings.

        Args:
            masks: The result of `masks_of` for the draft; None allows all tokens.
        """
        owners = _owners(self.draft)
        samplings = [state.request.sampling for state in states]
        return to_rows(self.extension.logits, owners, samplings, lambda: self._before(states), masks)

    def likeliest(self, states: Sequence[Running], masks: Int[Tensor, "nodes words"] | None) -> Int[Tensor, " nodes"]:
        """The token that the target's distribution after each node is one-hot at, if all requests are at temperature 0;
        -1 where it is no distribution.
        """
        owners, logits = _owners(self.draft), self.extension.logits
        rule = RowRule.of([states[owner].request.sampling for owner in owners.tolist()], logits)
        return rule.lawful_likeliest(logits, lambda: self._before(states), masks)

    def agreeing(self, likeliest: Int[Tensor, " nodes"], states: Sequence[Running]) -> list[Survivor]:
        """The path of each request along which the draft's tokens are the likeliest ones, and the token behind it; one
        copy from the device.

        It is what verifiers accept that have the trait `takes_likeliest`, if all requests are at temperature 0 and the
        draft was chosen.

        Raises:
            NoDistribution: At a node of a path, the target gives no token a positive probability.
        """
        draft, count = self.draft, len(self.draft.tokens)
        everything = torch.cat([draft.tokens, likeliest]).tolist()
        drafted, following = everything[:count], everything[count:]
        first_child, links, survivors = draft.first_child.tolist(), draft.links.tolist(), []
        for i, root in enumerate(draft.offsets[:-1].tolist()):
            node, path, tokens = root, list[int](), list[int]()
            while True:
                if following[node] < 0:
                    raise no_distribution(states[i])
                tokens.append(following[node])
                children = links[first_child[node] : first_child[node + 1]]
                agreed = next((child for child in children if drafted[child] == tokens[-1]), None)
                if agreed is None:
                    break
                node = agreed
                path.append(node - root)
            survivors.append(Survivor(path=path, tokens=tokens))
        return survivors

    def decided(
        self, decision: Decision, rows: Float[Tensor, "nodes vocab"], states: Sequence[Running]
    ) -> list[Survivor]:
        """The accepted path of each request; one copy from the device.

        Raises:
            NoDistribution: At a node of a path, the target gives no token a positive probability.
        """
        draft, count = self.draft, len(self.draft.tokens)
        parts = [draft.tokens, without_law(rows).to(draft.tokens), decision.next_tokens, decision.last]
        everything, survivors = torch.cat(parts).tolist(), list[Survivor]()
        drafted, lawless, ends = everything[:count], everything[count : 2 * count], everything[2 * count :]
        following, last = ends[: len(states)], ends[len(states) :]
        for i, root in enumerate(draft.offsets[:-1].tolist()):
            nodes = list[int]()
            node = last[i]
            while node != root:
                nodes.append(node)
                node = int(draft.parents[node])
            if any(lawless[node] for node in [root, *nodes]):
                raise no_distribution(states[i])
            tokens = [*(drafted[node] for node in nodes[::-1]), following[i]]
            survivors.append(Survivor(path=[node - root for node in nodes[::-1]], tokens=tokens))
        return survivors

    def survivors(
        self, verdict: Verdict, rows: Float[Tensor, "nodes vocab"], states: Sequence[Running]
    ) -> list[Survivor]:
        """The accepted path of each request; one copy from the device.

        Raises:
            NoDistribution: At a node of a path, the target gives no token a positive probability.
        """
        draft, count = self.draft, len(self.draft.tokens)
        everything = torch.cat([draft.tokens, verdict.next_tokens, without_law(rows).to(draft.tokens)]).tolist()
        drafted, following = everything[:count], everything[count : count + draft.num_requests]
        lawless = everything[count + draft.num_requests :]
        survivors = []
        pairs = zip(draft.offsets[:-1].tolist(), verdict.num_accepted.tolist(), strict=True)
        for i, (first, accepted) in enumerate(pairs):
            nodes = verdict.paths[i, :accepted].tolist()
            if any(lawless[node] for node in [first, *nodes]):
                raise no_distribution(states[i])
            tokens = [*(drafted[node] for node in nodes), following[i]]
            survivors.append(Survivor(path=[node - first for node in nodes], tokens=tokens))
        return survivors

    def kept(self, paths: Sequence[Sequence[int]]) -> list[list[int]]:
        """Per request, the target's pending nodes to commit: the tokens in `behind`, the root, the accepted path."""
        return [
            [*range(len(before)), *(len(before) + node for node in [0, *path])]
            for before, path in zip(self.behind, paths, strict=True)
        ]

    def numbered(self, paths: Sequence[Sequence[int]]) -> list[list[int]]:
        """The same paths, in the drafter's numbers of the nodes."""
        draft = self.draft
        return [
            draft.numbers[draft.offsets[i] + np.array(path, dtype=np.int64)].tolist() for i, path in enumerate(paths)
        ]

    def known(self, states: Sequence[Running], emitted: Sequence[Sequence[int]]) -> list[list[int]]:
        """The tokens at the new committed positions of each request. `state.tokens` does not have the new ones yet."""
        return [
            [*before, state.tokens[-1], *new[:-1]]
            for state, before, new in zip(states, self.behind, emitted, strict=True)
        ]

    def observed(self, kept: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]) -> Observed:
        """The new committed positions with their hidden states.

        Args:
            kept: The result of `kept`.
            tokens: The result of `known`.
        """
        offsets = np.cumsum([0, *map(len, tokens)])
        flat = np.array([token for row in tokens for token in row], dtype=np.int64)
        if not self.extension.taps:
            return Observed(tokens=flat, offsets=offsets)
        starts = self.draft.offsets[:-1] + np.cumsum([0, *map(len, self.behind)])[:-1]
        index = np.concatenate([start + np.array(nodes) for start, nodes in zip(starts, kept, strict=True)])
        return Observed(tokens=flat, offsets=offsets, taps=_gathered(self.extension.taps, index))

    def logits(self, request: int, path: Sequence[int]) -> Float[Tensor, "n vocab"]:
        """One request's raw logits at the root and along its path, in float32."""
        return self._at(self._nodes(request, path)).float()

    def log_probs(
        self, states: Sequence[Running], paths: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
    ) -> list["LogProbs"]:
        """The log-probabilities that each request asked for, at its root and along its path; one copy from the device.

        Args:
            paths: As in `kept`.
            tokens: The token that each request emitted at each of these places.
        """
        results = [LogProbs()] * len(states)
        asking = [i for i, state in enumerate(states) if state.request.logprobs is not None]
        if asking:
            nodes = np.concatenate([self._nodes(i, paths[i]) for i in asking])
            wanted = [states[i].request.logprobs or 0 for i in asking]
            for i, scores in zip(
                asking, LogProbs.of(self._at(nodes), [tokens[i] for i in asking], wanted), strict=True
            ):
                results[i] = scores
        return results

    def _nodes(self, request: int, path: Sequence[int]) -> Int[np.ndarray, " nodes"]:
        """Packed indices of a request's root and the nodes of a path."""
        return self.draft.offsets[request] + np.array([0, *path], dtype=np.int64)

    def _at(self, nodes: Int[np.ndarray, " nodes"]) -> Float[Tensor, "nodes vocab"]:
        """The logits at some nodes."""
        logits = self.extension.logits
        return logits[upload([nodes], logits.device)[0]]

    def _before(self, states: Sequence[Running]) -> Before:
        """The text before each node's children: prompt, output, and the path down to the node itself."""
        draft = self.draft
        return Before(
            texts=[text_of(state) for state in states],
            owners=_owners(draft),
            tokens=draft.tokens,
            paths=climbed(np.arange(len(draft.parents)), draft.parents, draft.depths),
            lengths=draft.depths,
        )


@dataclass(frozen=True, kw_only=True)
class LogProbs:
    """Log-softmax of raw logits, at some tokens and at the likeliest ones.

    Attributes:
        chosen: Of the tokens that were emitted; None if not asked for.
        top: Of the likeliest tokens at each position, by token id; None if not asked for.
    """

    chosen: tuple[float, ...] | None = None
    top: tuple[dict[int, float], ...] | None = None

    @classmethod
    def of(
        cls, logits: Float[Tensor, "n vocab"], tokens: Sequence[Sequence[int]], wanted: Sequence[int]
    ) -> list["LogProbs"]:
        """The log-probabilities of several requests; one copy from the device.

        Args:
            logits: Of all requests, one after the other.
            tokens: The tokens that each request emitted there.
            wanted: How many of the likeliest tokens each request asked for.
        """
        flat = np.array([token for ids in tokens for token in ids], dtype=np.int64)
        columns = [log_probs(logits, upload([flat], logits.device)[0])[:, None]]
        count = min(max(wanted), logits.shape[-1])
        if count:
            best = logits.float().log_softmax(-1).topk(count, -1)
            columns += [best.values, best.indices]
        # Numbers of both kinds are exact in float64.
        rows = torch.cat([column.double() for column in columns], 1).tolist()
        results, first = [], 0
        for ids, most in zip(tokens, wanted, strict=True):
            part, first = rows[first : first + len(ids)], first + len(ids)
            chosen = tuple(row[0] for row in part)
            pairs = (zip(map(int, row[1 + count :]), row[1 : 1 + count], strict=True) for row in part)
            top = tuple(dict(islice(each, most)) for each in pairs)
            results.append(cls(chosen=chosen, top=top if most else None))
        return results

    @classmethod
    def in_parts(cls, logits: Float[Tensor, "n vocab"], tokens: Sequence[int], wanted: int) -> "LogProbs":
        """The log-probabilities of one request at many positions, a few at a time to spare memory."""
        count, parts = rows_at_once(logits), list[LogProbs]()
        for first in range(0, len(tokens), count):
            part = slice(first, first + count)
            parts += cls.of(logits[part], [tokens[part]], [wanted])
        return cls(
            chosen=tuple(value for each in parts for value in each.chosen or ()),
            top=tuple(row for each in parts for row in each.top or ()) if wanted else None,
        )


def masks_of(draft: Draft, states: Sequence[Running], vocab_size: int) -> Int[Tensor, "nodes words"] | None:
    """The tokens that may follow each node of a draft, as packed masks; None if no request has a constraint."""
    if not any(is_masked(state) for state in states):
        return None
    owners = _owners(draft)
    above = np.maximum(draft.parents - draft.offsets[owners], -1)
    return batch_masks(states, owners, draft.tokens, above, vocab_size)


def _owners(draft: Draft) -> Int[np.ndarray, " nodes"]:
    """The request of each node."""
    return np.repeat(np.arange(draft.num_requests), np.diff(draft.offsets))


def no_distribution(state: Running) -> NoDistribution:
    """The error for a request whose target row gives no token a positive probability."""
    request = state.request
    if request.constraint is not None and len(state.output) < request.min_tokens:
        return NoDistribution(
            f"min_tokens={request.min_tokens} and the constraint (a grammar, or tokens that are allowed or forbidden) "
            f"leave no token in the output of request {request.id!r}: the output must end before it has so many "
            "tokens; lower min_tokens, or let the constraint go on"
        )
    return NoDistribution(
        f"the target gives no probability to any token after {len(state.output)} tokens of request "
        f"{state.request.id!r}: its logits are not numbers there, or biases, processors or a constraint forbid every "
        "token; look at the request's settings, and let `outrider prove` look at the weights"
    )


def _segment(draft: Draft, request: int, slot: int, before: Sequence[int]) -> Segment:
    """The segment of one request: the committed tokens `before` its root, then its draft, with logits for the draft."""
    first, end = int(draft.offsets[request]), int(draft.offsets[request + 1])
    tokens, parents = draft.tokens[first:end], np.maximum(draft.parents[first:end] - first, -1)
    chain = np.array_equal(parents, np.arange(-1, end - first - 1))
    if before:
        tokens = torch.cat([upload([np.array(before)], tokens.device)[0], tokens])
        parents = np.concatenate([np.arange(-1, len(before) - 1), parents + len(before)])
    return Segment(slot=slot, tokens=tokens, parents=None if chain else parents, logits=end - first)


def _gathered(
    taps: Mapping[int, Float[Tensor, "nodes hidden"]], index: Int[np.ndarray, " positions"]
) -> dict[int, Float[Tensor, "positions hidden"]]:
    """The tapped states at some indices; a view if the indices are consecutive."""
    if (np.diff(index) == 1).all():
        return {k: values[int(index[0]) : int(index[-1]) + 1] for k, values in taps.items()}
    [where] = upload([index], next(iter(taps.values())).device)
    return {k: values[where] for k, values in taps.items()}
