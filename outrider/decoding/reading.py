"""A draft and what the target said of it in one forward, with all arithmetic of offsets in one place."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.constraints.masks import batch_masks
from outrider.decoding.protocol import NoDistribution
from outrider.drafters.protocol import Observed
from outrider.lm.protocol import LM, Extension, Segment
from outrider.sampling import Prefix, log_probs, to_rows, without_law
from outrider.types import Draft, Running, Verdict


@dataclass(frozen=True, kw_only=True)
class Survivor:
    """What one request keeps of its draft, on the host.

    Attributes:
        path: Numbers of the accepted nodes in the packed draft, less the root's.
        tokens: Their tokens, and the one that follows them.
    """

    path: list[int]
    tokens: list[int]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One forward of the target over tokens that it had not digested, and the drafts behind them.

    Attributes:
        draft: The drafts.
        behind: Per request, the tokens before its root that were digested in the same forward.
        extension: Logits of the nodes of the draft; hidden states of these and of what stood before them.
    """

    draft: Draft
    behind: Sequence[Sequence[int]]
    extension: Extension

    @classmethod
    def of(cls, target: LM, draft: Draft, states: Sequence[Running], taps: Sequence[int] = ()) -> "Reading":
        """Let the target read a draft. Tokens before a root that it has not digested are digested on the way."""
        behind = [state.tokens[target.length(state.slot) : -1] for state in states]
        segments = [_segment(draft, i, state.slot, behind[i]) for i, state in enumerate(states)]
        return cls(draft=draft, behind=behind, extension=target.extend(segments, taps=taps))

    def rows(self, states: Sequence[Running], masks: Int[Tensor, "nodes words"] | None) -> Float[Tensor, "nodes vocab"]:
        """The target's distribution after each node, under its request's settings.

        Args:
            masks: What `masks_of` says of the draft.
        """
        owners = _owners(self.draft)
        samplings = [state.request.sampling for state in states]
        return to_rows(
            self.extension.logits, owners, samplings, lambda node: self._prefix(states[owners[node]], node), masks
        )

    def survivors(
        self, verdict: Verdict, rows: Float[Tensor, "nodes vocab"], states: Sequence[Running]
    ) -> list[Survivor]:
        """What the verdict leaves of each request; one copy from the device.

        Raises:
            NoDistribution: The target gives no distribution at a place from which a token was drawn.
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
        """Per request, the pending nodes of the target to commit: what stood before the root, the root, its path."""
        return [
            [*range(len(before)), *(len(before) + node for node in [0, *path])]
            for before, path in zip(self.behind, paths, strict=True)
        ]

    def numbered(self, paths: Sequence[Sequence[int]]) -> list[list[int]]:
        """Paths by the numbers that drafters know the nodes by."""
        draft = self.draft
        return [
            draft.numbers[draft.offsets[i] + np.array(path, dtype=np.int64)].tolist() for i, path in enumerate(paths)
        ]

    def observed(self, kept: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]) -> Observed:
        """What has become known of the target: the hidden states of what was kept, gathered once.

        Args:
            kept: What `kept` returned.
            tokens: The token at each of these positions.
        """
        offsets = np.cumsum([0, *map(len, tokens)])
        said = np.array([token for own in tokens for token in own], dtype=np.int64)
        if not self.extension.taps:
            return Observed(tokens=said, offsets=offsets)
        starts = self.draft.offsets[:-1] + np.cumsum([0, *map(len, self.behind)])[:-1]
        index = np.concatenate([start + np.array(own) for start, own in zip(starts, kept, strict=True)])
        return Observed(tokens=said, offsets=offsets, taps=_gathered(self.extension.taps, index))

    def logits(self, request: int, path: Sequence[int]) -> Float[Tensor, "n vocab"]:
        """One request's raw logits at the root and along its path, in float32."""
        nodes = torch.tensor([int(self.draft.offsets[request]) + node for node in [0, *path]])
        return self.extension.logits[nodes.to(self.extension.logits.device)].float()

    def _prefix(self, state: Running, node: int) -> Prefix:
        """Prompt and output before a node's children: the path down to the node, the node included."""
        path: list[int] = []
        while self.draft.parents[node] >= 0:
            path.append(int(self.draft.tokens[node]))
            node = int(self.draft.parents[node])
        return Prefix(prompt=state.request.prompt, output=[*state.output, *path[::-1]])


@dataclass(frozen=True, kw_only=True)
class LogProbs:
    """Log-softmax of raw logits, at some tokens and at the likeliest ones.

    Attributes:
        chosen: Of the tokens that were emitted; None if not asked for.
        top: Of the likeliest tokens at each place, by their ids; None if not asked for.
    """

    chosen: tuple[float, ...] | None = None
    top: tuple[dict[int, float], ...] | None = None

    @classmethod
    def of(cls, logits: Float[Tensor, "n vocab"], tokens: Sequence[int], wanted: int | None) -> "LogProbs":
        """What a request that asked for so many gets; see `Request.logprobs`."""
        if wanted is None:
            return cls()
        chosen = tuple(log_probs(logits, torch.tensor(tokens).to(logits.device)).tolist())
        if wanted == 0:
            return cls(chosen=chosen)
        best = logits.log_softmax(-1).topk(min(wanted, logits.shape[-1]), -1)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return cls(chosen=chosen, top=tuple(dict(zip(ids, values, strict=True)) for ids, values in pairs))


def masks_of(draft: Draft, states: Sequence[Running], vocab_size: int) -> Int[Tensor, "nodes words"] | None:
    """What may follow each node of a draft, packed; None where everything may."""
    owners = _owners(draft)
    above = np.maximum(draft.parents - draft.offsets[owners], -1)
    return batch_masks(states, owners, draft.tokens, above, vocab_size)


def _owners(draft: Draft) -> Int[np.ndarray, " nodes"]:
    """The request of each node."""
    return np.repeat(np.arange(draft.num_requests), np.diff(draft.offsets))


def no_distribution(state: Running) -> NoDistribution:
    """What is said where the target gives a request nothing to draw from."""
    return NoDistribution(
        f"the target gives no probability to any token after {len(state.output)} tokens of request "
        f"{state.request.id!r}: its logits are not numbers there, or biases, processors or a constraint forbid every "
        "token; look at the weights and at the request's settings"
    )


def _segment(draft: Draft, request: int, slot: int, before: Sequence[int]) -> Segment:
    """What is not digested yet of a request, and then its draft, whose logits are wanted."""
    first, end = int(draft.offsets[request]), int(draft.offsets[request + 1])
    tokens, parents = draft.tokens[first:end], np.maximum(draft.parents[first:end] - first, -1)
    chain = np.array_equal(parents, np.arange(-1, end - first - 1))
    if before:
        tokens = torch.cat([torch.tensor(before).to(tokens.device), tokens])
        parents = np.concatenate([np.arange(-1, len(before) - 1), parents + len(before)])
    return Segment(slot=slot, tokens=tokens, parents=None if chain else parents, logits=end - first)


def _gathered(
    taps: Mapping[int, Float[Tensor, "nodes hidden"]], index: Int[np.ndarray, " positions"]
) -> dict[int, Float[Tensor, "positions hidden"]]:
    """Some of the tapped states; a view where they are neighbours."""
    if (np.diff(index) == 1).all():
        return {k: values[int(index[0]) : int(index[-1]) + 1] for k, values in taps.items()}
    where = torch.from_numpy(index)
    return {k: values[where.to(values.device)] for k, values in taps.items()}
