"""The values that pass between rooms: sampling settings, requests, drafts, verdicts, steps. No models, no policy."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.processors import STATEFUL, Processor, is_blind

Structure = Literal["chain", "iid", "iid_dedup", "without_replacement", "top_plus_one", "deterministic"]
"""How the children of a node were chosen; what a verifier may assume about them."""


@runtime_checkable
class Constraint(Protocol):
    """Which tokens may come next, given the output so far: a grammar, or any automaton over tokens. Immutable.

    Masks are packed, 32 tokens to a word, as `outrider.sampling.pack` makes them: a bit is 1 where the token may come.
    """

    def open(self) -> object:
        """State of a new request, before its first token. It may change in place, but by `commit` alone as far as
        masks are concerned."""
        ...

    def masks(self, state: object, tokens: Sequence[int], parents: Sequence[int]) -> Int[Tensor, "nodes words"]:
        """What may follow each node of a draft, on the host.

        At least one token must be allowed after every node that is itself allowed. After the others, and after an
        ending token, any row will do; all ones are best.

        Args:
            tokens: Token of each node; node 0 is the root, whose token is the newest committed one.
            parents: Number of each node's parent, -1 for the root; parents come first.
        """
        ...

    def commit(self, state: object, tokens: Sequence[int]) -> None:
        """Tokens that were emitted, in order."""
        ...


class InputError(ValueError):
    """Something that a person typed is wrong; the message says what was given, what is allowed, what to do."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn from the target's logits; the names and meanings are vLLM's.

    Attributes:
        temperature: Divides the logits; 0 means greedy.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the smallest set of most likely tokens whose mass reaches this, in (0, 1].
        min_p: Drop tokens less likely than this share of the most likely one, in [0, 1].
        repetition_penalty: Divides positive and multiplies negative logits of tokens in the prompt or the output.
        frequency_penalty: Subtracted once for each time that the token stands in the output.
        presence_penalty: Subtracted once if the token stands in the output.
        logit_bias: Added to the logits of these token ids.
        processors: Stateless transformers logits processors, applied per node with that node's own prefix.
        seed: Seed of this request's draws; None takes one from the engine.

    Example:
        >>> Sampling(temperature=-0.5)
        Traceback (most recent call last):
        ...
        outrider.types.InputError: temperature must be >= 0 (0 means greedy), got -0.5
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    processors: Sequence[Processor] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        factor = self.repetition_penalty
        checks = [
            (0 <= self.temperature < math.inf, "temperature must be >= 0 (0 means greedy)", self.temperature),
            (self.top_k >= 0, "top_k must be >= 0 (0 keeps all tokens)", self.top_k),
            (0 < self.top_p <= 1, "top_p must be in (0, 1]", self.top_p),
            (0 <= self.min_p <= 1, "min_p must be in [0, 1]", self.min_p),
            (0 < factor < math.inf, "repetition_penalty must be > 0 (1 means none)", factor),
            (math.isfinite(self.frequency_penalty), "frequency_penalty must be finite", self.frequency_penalty),
            (math.isfinite(self.presence_penalty), "presence_penalty must be finite", self.presence_penalty),
            (self.seed is None or self.seed >= 0, "seed must be >= 0", self.seed),
        ]
        for fine, rule, given in checks:
            if not fine:
                raise InputError(f"{rule}, got {given}")
        if wrong := [bias for bias in self.logit_bias.values() if not bias < math.inf]:
            raise InputError(f"a logit_bias must be a number (-inf forbids a token), got {wrong[0]}")
        if names := STATEFUL.intersection(type(processor).__name__ for processor in self.processors):
            raise InputError(
                f"{', '.join(sorted(names))} remembers earlier calls or wants rows of its own, and cannot follow a "
                "draft; use processors that depend on the tokens alone"
            )

    @property
    def reads_prefix(self) -> bool:
        """Whether a row depends on the tokens before it, beyond the logits."""
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)
        return penalties or not all(is_blind(processor) for processor in self.processors)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked: continue `prompt`, drawing as `sampling` says, until an end.

    Attributes:
        id: Unique name within an engine.
        prompt: Token ids, at least one.
        max_new_tokens: Most tokens to emit, at least one.
        sampling: How tokens are drawn; the engine sets its seed where it has none.
        eos_ids: Token ids that end the output; the ending token is kept in `tokens`.
        stop: Strings that end the output; the text ends before the first of them.
        min_tokens: Fewest tokens to emit before an ending token may come or a stop string counts.
        logprobs: Which log-probabilities to record, by the raw target logits: None none, 0 that of each emitted token,
            k those of the k likeliest tokens as well.
        keep_logits: Whether each step brings the raw target logits at its emitted tokens.
        ends: Asked after every emitted token, in order, with the output so far: whether it ends the output.
        constraint: Which tokens may come next; None allows all.
    """

    id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
    eos_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    keep_logits: bool = False
    ends: Callable[[Sequence[int]], bool] | None = None
    constraint: Constraint | None = None


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """A chain of drafted tokens that are not judged yet, where decoding drafts on before it verifies.

    Attributes:
        tokens: Token ids.
        rows: The row that each was REALLY drawn from; None where they were chosen, or where there are none.
        short_list: Which tokens the rows are of; None: all.
    """

    tokens: tuple[int, ...] = ()
    rows: Float[Tensor, "n width"] | None = None
    short_list: "ShortList | None" = None

    def part(self, where: slice) -> "Ahead":
        """Some of the tokens."""
        return replace(self, tokens=self.tokens[where], rows=None if self.rows is None else self.rows[where])


@dataclass(kw_only=True)
class Running:
    """A request under way, owned and changed in place by the loop.

    Attributes:
        request: What was asked.
        tokens: Committed tokens, the prompt included; the target has digested all but the newest, the anchor.
        slot: The target's slot.
        drafter: Who drafts for it. An engine whose drafter is replaced keeps the old one for requests under way.
        drafter_state: What the drafter's `open` returned.
        length_state: What the length policy's `open` returned.
        carried: What the verifier carries from step to step, if it does.
        ahead: Tokens drafted behind the anchor that the next step is to judge, if decoding drafts ahead.
        constraint_state: What the constraint's `open` returned; None until its first step, or where there is none.
        num_steps: Steps made; part of the key of every draw.
    """

    request: Request
    tokens: list[int]
    slot: int
    drafter: object
    drafter_state: object = None
    length_state: object = None
    carried: object = None
    ahead: Ahead = Ahead()
    constraint_state: object = None
    num_steps: int = 0

    @property
    def output(self) -> list[int]:
        """Tokens emitted so far."""
        return self.tokens[len(self.request.prompt) :]


@dataclass(frozen=True, kw_only=True, eq=False)
class ShortList:
    """A part of the target's vocabulary: the tokens that a drafter can propose at all.

    Attributes:
        ids: The target's ids, ascending.
        places: For each id of the target, its place in the list; -1 where it is not there.

    Example:
        >>> few = ShortList.of(torch.tensor([1, 3]), vocab_size=4)
        >>> few.widened(torch.tensor([[0.25, 0.75]]))
        tensor([[0.0000, 0.2500, 0.0000, 0.7500]])
    """

    ids: Int[Tensor, " width"]
    places: Int[Tensor, " vocab"]

    @classmethod
    def of(cls, ids: Int[Tensor, " width"], vocab_size: int) -> "ShortList":
        """The list of some ids, all different and below the size of the vocabulary."""
        ids = ids.sort().values
        places = torch.full((vocab_size,), -1, device=ids.device)
        places[ids] = torch.arange(len(ids), device=ids.device)
        return cls(ids=ids, places=places)

    def widened(self, rows: Float[Tensor, "n width"], fill: float = 0.0) -> Float[Tensor, "n vocab"]:
        """Rows over the whole vocabulary, `fill` at tokens that are not in the list."""
        return rows.new_full((len(rows), len(self.places)), fill).index_copy_(1, self.ids, rows)


@dataclass(frozen=True, kw_only=True)
class Guess:
    """What may follow each of n nodes: either raw logits, or one token (-1: nothing to propose).

    Attributes:
        logits: Of all tokens of the target, or of those of the short list.
        tokens: The target's ids.
        short_list: Which tokens the logits are of; None: all.
    """

    logits: Float[Tensor, "n width"] | None = None
    tokens: Int[np.ndarray, " n"] | None = None
    short_list: ShortList | None = None


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """New draft nodes that are to be expanded, over all requests.

    Attributes:
        owners: Index of each node's request in the batch; ascending.
        nodes: Number of the node within its request's growing tree; the root is 0. Numbers follow growth order.
        parents: Number of its parent.
        depths: Distance from the root.
        tokens: Its token, on the drafter's device.
    """

    owners: Int[np.ndarray, " n"]
    nodes: Int[np.ndarray, " n"]
    parents: Int[np.ndarray, " n"]
    depths: Int[np.ndarray, " n"]
    tokens: Int[Tensor, " n"]


@dataclass(frozen=True, kw_only=True)
class Draft:
    """One token tree per request, packed: the nodes of request r are `offsets[r] : offsets[r + 1]`, its root first.

    A root holds the request's anchor, its newest committed token, and is not itself a draft token. Parents stand
    before their children. Topology lives on the host (NumPy), tokens and rows on the device.

    Attributes:
        tokens: Token id of each node.
        parents: Packed index of each node's parent; -1 for roots.
        depths: Distance from the root.
        numbers: Number of each node in its request's growing tree; numbers follow growth order and survive pruning.
        offsets: Where each request's nodes begin; the last entry is the number of nodes.
        first_child: `links[first_child[n] : first_child[n + 1]]` are the children of n in drawing order.
        links: Packed child indices; iid draws of one token repeat its node.
        rows: The rows that sampled children were REALLY drawn from; None where nothing was sampled.
        short_list: Which tokens the rows are of; None: all.
        row_of: Per node, the index in `rows` that its children were drawn from; -1 where they were chosen, not
            drawn, or where there are none. A chosen child is a point mass.
        structure: How the children were drawn.
    """

    tokens: Int[Tensor, " nodes"]
    parents: Int[np.ndarray, " nodes"]
    depths: Int[np.ndarray, " nodes"]
    numbers: Int[np.ndarray, " nodes"]
    offsets: Int[np.ndarray, " bounds"]
    first_child: Int[np.ndarray, " node_bounds"]
    links: Int[np.ndarray, " links"]
    rows: Float[Tensor, "drawn width"] | None
    row_of: Int[np.ndarray, " nodes"]
    structure: Structure
    short_list: ShortList | None = None

    @property
    def num_requests(self) -> int:
        return len(self.offsets) - 1

    def num_draft_tokens(self, request: int) -> int:
        """Drafted tokens of one request: its nodes without the root."""
        return int(self.offsets[request + 1] - self.offsets[request]) - 1

    @property
    def branches(self) -> bool:
        """Whether any node has more than one child."""
        return bool((np.diff(self.first_child) > 1).any())


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Which nodes survive, and what follows them.

    Attributes:
        paths: Packed node indices of each request's accepted path in order, without the root, padded with -1.
        num_accepted: Length of each path.
        next_tokens: The recovered token (after a rejection) or the bonus token (after none), on the device.
        carried: What each request's next verification is to be given, where the rule carries anything over.
    """

    paths: Int[np.ndarray, "requests depth"]
    num_accepted: Int[np.ndarray, " requests"]
    next_tokens: Int[Tensor, " requests"]
    carried: tuple[object, ...] = ()


@dataclass(kw_only=True)
class Timing:
    """Seconds of one iteration of the loop, shared by the steps of all its requests; filled in as it goes.

    `overlap` is how much of the drafter's time lay beside the target's and counts once in the total.
    """

    target: float = 0.0
    drafter: float = 0.0
    rows: float = 0.0
    verify: float = 0.0
    commit: float = 0.0
    replay: float = 0.0
    rest: float = 0.0
    overlap: float = 0.0

    @property
    def total(self) -> float:
        parts = (self.target, self.drafter, self.rows, self.verify, self.commit, self.replay, self.rest)
        return sum(parts) - self.overlap


@dataclass(frozen=True, kw_only=True)
class Step:
    """One draft-verify-commit cycle of one request.

    Attributes:
        num_draft_tokens: Nodes drafted, the root not counted. Where decoding drafts ahead, those whose fate the step
            decides: the ones judged and the ones thrown away unjudged.
        num_accepted_tokens: Nodes on the accepted path (before any end-of-sequence cut).
        tokens: What was emitted: accepted tokens and the next one, cut where the request ended. No next one where
            decoding has already drafted on.
        timing: The iteration's shared clock.
        num_requests: How many requests shared the iteration.
        logprobs: Log-softmax of the raw target logits at each emitted token, if asked for.
        top_logprobs: The same of the likeliest tokens at each, by their ids, if asked for.
        logits: The raw target logits that each emitted token was drawn from, in float32, if asked for.
    """

    request: str
    num_draft_tokens: int
    num_accepted_tokens: int
    tokens: tuple[int, ...]
    timing: Timing
    num_requests: int
    logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[Mapping[int, float], ...] | None = None
    logits: Float[Tensor, "n vocab"] | None = None
