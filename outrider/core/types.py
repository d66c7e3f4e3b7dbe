"""The values that pass between rooms: sampling settings, requests, drafts, verdicts, steps. No models, no policy."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.core.constraint import Constraint
from outrider.core.inputs import InputError as InputError
from outrider.core.inputs import number, whole
from outrider.core.option import check, option
from outrider.core.processors import STATEFUL, Processor, is_blind

Structure = Literal["chain", "iid", "iid_dedup", "without_replacement", "top_plus_one", "deterministic", "union"]
"""How the children of a node were made, which is what a verifier may assume about them."""


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
        seed: Seed of this request's draws, 0 .. 2**64 - 1; None takes one from the engine. The same seed and the same
            `max_new_tokens` give the same text, alone or in a batch, in float32 and float64; in bfloat16 and float16
            up to roundings.

    Raises:
        InputError: A value of the wrong kind, or one that is out of bounds. NumPy's numbers become Python's.

    Example:
        >>> Sampling(temperature=-0.5)
        Traceback (most recent call last):
        ...
        outrider.core.inputs.InputError: temperature must be >= 0 (0 means greedy), got -0.5
    """

    temperature: float = option(1.0, least=0, note=" (0 means greedy)")
    top_k: int = option(0, least=0, note=" (0 keeps all tokens)")
    top_p: float = option(1.0, above=0, most=1)
    min_p: float = option(0.0, least=0, most=1)
    repetition_penalty: float = option(1.0, above=0, note=" (1 means none)")
    frequency_penalty: float = option(0.0)
    presence_penalty: float = option(0.0)
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    processors: Sequence[Processor] = ()
    seed: int | None = option(None, least=0)

    def __post_init__(self) -> None:
        check(self)
        self._check_kinds()
        if wrong := [bias for bias in self.logit_bias.values() if not bias < math.inf]:
            raise InputError(f"a logit_bias must be a number (-inf forbids a token), got {wrong[0]}")
        if names := STATEFUL.intersection(type(processor).__name__ for processor in self.processors):
            raise InputError(
                f"{', '.join(sorted(names))} remembers earlier calls or wants rows of its own, and cannot follow a "
                "draft; use processors that depend on the tokens alone"
            )

    def _check_kinds(self) -> None:
        """Tokens that are whole numbers, processors that can be called."""
        if not isinstance(self.logit_bias, Mapping):
            raise InputError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}")
        bias = {whole("a token of logit_bias", t): number("a logit_bias", b) for t, b in self.logit_bias.items()}
        object.__setattr__(self, "logit_bias", bias)
        if not isinstance(self.processors, Sequence) or not all(callable(each) for each in self.processors):
            raise InputError(f"processors must be a list of logits processors, got {self.processors!r}")

    @property
    def reads_prefix(self) -> bool:
        """Whether a row depends on the tokens before it, beyond the logits."""
        return self.penalises or not all(is_blind(processor) for processor in self.processors)

    @cached_property
    def penalises(self) -> bool:
        """Whether tokens that stand in the text get other logits."""
        return self.repetition_penalty != 1 or self.counts_output

    @property
    def counts_output(self) -> bool:
        """Whether it matters how often a token stands in the output."""
        return (self.frequency_penalty, self.presence_penalty) != (0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request: continue `prompt` until an end.

    Attributes:
        id: Unique name within an engine.
        prompt: Token ids, at least one.
        max_new_tokens: Most tokens to emit; 0 only reads the prompt, for `prompt_logprobs`.
        sampling: How tokens are drawn; the engine sets a seed if it has none.
        eos_ids: Token ids that end the output. The output's `tokens` include the end token.
        stop: Strings that end the output; the text ends before the first of them.
        min_tokens: Fewest tokens before an end token may come. A stop string counts if it ends behind them.
        logprobs: Which log-probabilities of the raw target logits to record: None for none, 0 for each emitted token, k
            for the k likeliest tokens as well.
        keep_logits: Whether each step records the raw target logits of its emitted tokens.
        ends: Called after every emitted token with the output so far; returns whether the output ends there.
        constraint: Which tokens may come next; None allows all.
        include_stop: Whether the text keeps the stop string that ends it.
        prompt_logprobs: The same for the tokens of the prompt: None for none, 0 for each token, k for the k likeliest
            tokens as well. Its prompt is prefilled without a reused beginning.
        priority: Of waiting requests, those with the lowest number get slots first.
        max_draft_tokens: Deepest draft of a step; 0 drafts nothing; None leaves it to the length policy.
        max_draft_context: Longest context, in tokens, behind which a token is drafted; None: any length.
        repeats: Whether drafts must not depend on other requests, so that drawn tokens depend on the seed alone, up to
            roundings. The engine sets it for requests that come with a seed, unless its verifier draws what no draft
            changes.
        prediction: Tokens that the output may repeat. Drafters that copy earlier text copy them too.
        owner: Whose request it is. A drafter that remembers texts of ended requests drafts those of the same owner
            alone.

    Raises:
        InputError: A value of the wrong kind. NumPy's numbers become Python's.
    """

    id: str
    prompt: tuple[int, ...]
    max_new_tokens: int = option()
    sampling: Sampling
    eos_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    min_tokens: int = option(0)
    logprobs: int | None = option(None, least=0, note=", or None for none")
    keep_logits: bool = False
    ends: Callable[[Sequence[int]], bool] | None = None
    constraint: Constraint | None = None
    include_stop: bool = False
    prompt_logprobs: int | None = option(None, least=0, note=", or None for none")
    priority: int = option(0)
    max_draft_tokens: int | None = option(None, least=0, note=" (0 drafts nothing)")
    max_draft_context: int | None = option(None, least=0, note=" tokens")
    repeats: bool = False
    prediction: tuple[int, ...] = ()
    owner: str | None = None

    def __post_init__(self) -> None:
        if not all(type(token) is int for token in self.prompt):
            tokens = tuple(whole("a token of the prompt", token) for token in self.prompt)
            object.__setattr__(self, "prompt", tokens)
        check(self)
        predicted = tuple(whole("a token of the prediction", token) for token in self.prediction)
        object.__setattr__(self, "prediction", predicted)
        object.__setattr__(self, "eos_ids", frozenset(whole("a token of eos_ids", token) for token in self.eos_ids))
        if not isinstance(self.sampling, Sampling):
            raise InputError(f"sampling must be an outrider.Sampling, got {self.sampling!r}")
        if wrong := [text for text in self.stop if not isinstance(text, str)]:
            raise InputError(f"a stop string must be a text, got {wrong[0]!r}")
        if not isinstance(self.owner, str | None):
            raise InputError(f"owner must be a text, got {self.owner!r}")


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """A chain of draft tokens that are not verified yet, for a decoding that drafts ahead.

    Attributes:
        tokens: Token ids.
        rows: The row that each was REALLY drawn from; None if they were chosen, or if there are none.
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
    """A running request. The loop owns it and changes it in place.

    Attributes:
        request: What was asked.
        tokens: Committed tokens, prompt included. After prefill, the target's cache holds all but the newest, the
            anchor.
        slot: The target's slot.
        drafter: Its drafter. If the engine's drafter is replaced, running requests keep theirs.
        drafter_state: What the drafter's `open` returned.
        length_state: What the length policy's `open` returned.
        carried: What the verifier carries to the next step; None if it carries nothing.
        ahead: Tokens drafted behind the anchor that the next step verifies, if the decoding drafts ahead.
        constraint_state: What the constraint's `open` returned; None before the first step, or without a constraint.
        text: What penalties and processors read of the tokens, on the device; None while nothing asked for it.
        num_steps: Number of steps so far; part of the key of every draw.
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
    text: object = None
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
class Choices:
    """A few tokens after each of n nodes that a drafter knows, without a distribution over all of them.

    Attributes:
        tokens: The target's ids, the likeliest first; -1 where a node has fewer than others.
        chances: How likely each seems; 0 where there is none.
    """

    tokens: Int[np.ndarray, "n most"]
    chances: Float[np.ndarray, "n most"]


@dataclass(frozen=True, kw_only=True)
class Guess:
    """A drafter's guess after each of n nodes: raw logits, one token (-1: no guess), or a choice of tokens.

    Attributes:
        logits: Of all tokens of the target, or of those of the short list.
        tokens: The target's ids.
        choices: For a tree of chosen tokens, from a drafter that has no logits.
        short_list: Which tokens the logits are of; None: all.
        survival: The drafter's own estimate of the probability that a token drawn here is accepted, with all draft
            tokens before it; None: it makes none.
    """

    logits: Float[Tensor, "n width"] | None = None
    tokens: Int[np.ndarray, " n"] | None = None
    choices: Choices | None = None
    short_list: ShortList | None = None
    survival: Float[Tensor, " n"] | None = None


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
            drawn, or where there are none. A chosen child is a point mass. In a `union`, only the first child was drawn
            from the row, and all others were chosen.
        structure: How the children were drawn.
        chances: How likely each node seems to the drafter if its parent is accepted; None where nobody asks.
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
    chances: Float[np.ndarray, " nodes"] | None = None

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
    """The accepted path of each request, and the token that follows it.

    Attributes:
        paths: Packed node indices of each request's accepted path in order, without the root, padded with -1.
        num_accepted: Length of each path.
        next_tokens: The recovered token (after a rejection) or the bonus token (after none), on the device.
        carried: What each request's next verification gets, if the verifier carries anything.
    """

    paths: Int[np.ndarray, "requests depth"]
    num_accepted: Int[np.ndarray, " requests"]
    next_tokens: Int[Tensor, " requests"]
    carried: tuple[object, ...] = ()


@dataclass(kw_only=True)
class Timing:
    """Seconds of one iteration of the loop, shared by the steps of all its requests.

    Filled in during the step. `overlap` is the time during which drafter and target ran at once. The total counts it
    once.
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
        num_draft_tokens: Number of draft nodes, without the root. If the decoding drafts ahead, those that the step
            verified or threw away.
        num_accepted_tokens: Number of nodes on the accepted path, before the output is cut at its end.
        tokens: Emitted tokens: the accepted ones and the next one, cut where the request ended. There is no next one if
            the decoding has already drafted behind them.
        bonus: Whether the accepted path ends at a leaf of the draft, so that the next token is a bonus token and not a
            recovered one.
        timing: The iteration's shared clock.
        num_requests: Number of requests in the iteration.
        room: Longest draft that the step had room for; the drafter may have found fewer tokens, or none.
        depth: Depth of the draft: of a chain its length.
        promised: The probability that the drafter promised of each draft token, if all before it are accepted; none
            where it promises nothing. Of a tree, at each node that was reached, that one of its children is accepted.
        logprobs: Log-softmax of the raw target logits at each emitted token, if asked for.
        top_logprobs: The same for the likeliest tokens at each position, by token id, if asked for.
        logits: The raw target logits that each emitted token was drawn from, in float32, if asked for.
    """

    request: str
    num_draft_tokens: int
    num_accepted_tokens: int
    tokens: tuple[int, ...]
    timing: Timing
    num_requests: int
    bonus: bool = False
    room: int = 0
    depth: int = 0
    promised: tuple[float, ...] = ()
    logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[Mapping[int, float], ...] | None = None
    logits: Float[Tensor, "n vocab"] | None = None
