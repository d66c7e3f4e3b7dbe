r"""DSpark: DFlash with a small sequential head, which corrects each guess by the token before it.

DeepSeek 2026, https://arxiv.org/abs/2607.05147
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from reprlib import repr as short
from typing import Any, ClassVar, Literal, Protocol, cast, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from outrider.core.inputs import InputError, unknown
from outrider.core.types import Frontier, Guess, Running
from outrider.drafters.exports import Exports
from outrider.drafters.protocol import Rows
from outrider.heads.head import HeadFiles
from outrider.heads.parts.block_config import BlockConfig, CheckpointHints
from outrider.heads.parts.block_layouts import merged, words_on_causality
from outrider.heads.spec import HeadSpec
from outrider.heads.trunks.blocks import (
    CONFIDENCE,
    UNUSED,
    BlockDrafter,
    BlockObjective,
    BlockOptions,
    BlockState,
    FusedBlockHead,
    TrainedBlocks,
)
from outrider.learning.options import size
from outrider.lm.head import HeadLM
from outrider.lm.hf.checkpoint import TargetShape
from outrider.lm.hf.checkpoint import size as size_in
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead
from outrider.lm.slots.batch import upload
from outrider.trees.chained import Follow

DEEPSPEC = "Qwen3DSparkModel"
"""The architecture of the heads of DeepSpec. Other files have the name too, and lack keys that its class needs."""
OF_DEEPSPEC = {"num_anchors", "enable_confidence_head", "target_layer_ids"}
"""These keys."""
VANILLA = "vanilla"
"""The one sequential head that vLLM and llama.cpp have."""


@dataclass(frozen=True, kw_only=True)
class DSparkOptions(BlockOptions):
    """Train a DSpark head: DFlash with a small sequential head that corrects each guess by the token before it.

    Attributes:
        markov: What a guess is corrected by: the token before it (vanilla), gated by the trunk's output (gated), or all
            tokens since the anchor (rnn).
        markov_rank: Width of the sequential head.
        confidence: Train a head that estimates how likely each guess is accepted, for --length confident.
    """

    block_size: int = size(7, least=2)
    markov: str = size("vanilla")
    markov_rank: int = size(256)
    confidence: bool = size(True)


@dataclass(frozen=True, kw_only=True)
class DSparkSizes:
    """What the config of a DSpark head says alone.

    Attributes:
        markov: The kind of its sequential head.
        markov_rank: The width of that.
        confidence: What its confidence head reads beside the trunk's output: `markov`, the tokens before as the
            sequential head does, or `trunk`, nothing; None: it has none.
    """

    markov: str = VANILLA
    markov_rank: int = 256
    confidence: Literal["markov", "trunk"] | None = None


@runtime_checkable
class BlockCorrection(Protocol):
    """What corrects the trunk's guesses by the tokens that were drafted so far."""

    def start(self, count: int) -> Float[Tensor, "count state"]:
        """The state before the anchor is read."""
        ...

    def corrected(
        self,
        base: Float[Tensor, "n width"],
        state: Float[Tensor, "n state"],
        tokens: Int[Tensor, " n"],
        hidden: Float[Tensor, "n hidden"] | None,
    ) -> tuple[Float[Tensor, "n width"], Float[Tensor, "n state"]]:
        """Read one more token.

        Args:
            base: The trunk's logits of each guess.
            state: What was read before; `start` at the anchor.
            tokens: The token before each guess.
            hidden: What `BlockHead.guess_features` returns of the position that guesses; None on tables.

        Returns:
            The logits of the guesses, and the new state.
        """
        ...


class MarkovHead(nn.Module):
    r"""Logits that depend on the token before: $W_2 e$ with $e = W_1[y]$. At the start they are 0.

    Args:
        num_tokens: Tokens that may stand before.
        num_outputs: Width of the logits.
        rank: Width of $e$.
        hidden_size: Width of the trunk's output features.
    """

    def __init__(self, num_tokens: int, num_outputs: int, rank: int, hidden_size: int) -> None:
        super().__init__()
        self.rank = rank
        self.markov_w1 = nn.Embedding(num_tokens, rank)
        self.markov_w2 = nn.Linear(rank, num_outputs, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=0.02)
        nn.init.zeros_(self.markov_w2.weight)

    def step(
        self, state: Float[Tensor, "n rank"], tokens: Int[Tensor, " n"], hidden: Float[Tensor, "n hidden"] | None
    ) -> tuple[Float[Tensor, "n rank"], Float[Tensor, "n rank"]]:
        """Read one more token.

        Args:
            state: What was read before; `start` at the anchor.
            tokens: The token before each guess.
            hidden: The trunk's output feature of the position that guesses.

        Returns:
            The new state, and $e$.
        """
        return state, self.markov_w1(tokens)

    def start(self, count: int) -> Float[Tensor, "count rank"]:
        """The state before the anchor is read."""
        weight = self.markov_w1.weight
        return torch.zeros(count, self.rank, dtype=weight.dtype, device=weight.device)

    def corrected(
        self,
        base: Float[Tensor, "n width"],
        state: Float[Tensor, "n rank"],
        tokens: Int[Tensor, " n"],
        hidden: Float[Tensor, "n hidden"] | None,
    ) -> tuple[Float[Tensor, "n width"], Float[Tensor, "n rank"]]:
        """As `BlockCorrection` says."""
        after, read = self.step(state, tokens, hidden)
        return base + self(read)[:, : base.shape[1]], after

    def along(
        self, tokens: Int[Tensor, "n depth"], hidden: Float[Tensor, "n depth hidden"]
    ) -> Float[Tensor, "n depth rank"]:
        """The $e$ of all guesses of blocks whose tokens are known."""
        state, reads = self.start(len(tokens)), []
        for depth in range(tokens.shape[1]):
            state, read = self.step(state, tokens[:, depth], hidden[:, depth])
            reads.append(read)
        return torch.stack(reads, 1)

    def forward(self, read: Float[Tensor, "*batch rank"]) -> Float[Tensor, "*batch vocab"]:
        """The logits that are added."""
        return self.markov_w2(read)


class GatedMarkovHead(MarkovHead):
    r"""The same with $e = \sigma(G [h; W_1[y]]) \cdot W_1[y]$, where $h$ is the trunk's output feature."""

    def __init__(self, num_tokens: int, num_outputs: int, rank: int, hidden_size: int) -> None:
        super().__init__(num_tokens, num_outputs, rank, hidden_size)
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def step(
        self, state: Float[Tensor, "n rank"], tokens: Int[Tensor, " n"], hidden: Float[Tensor, "n hidden"] | None
    ) -> tuple[Float[Tensor, "n rank"], Float[Tensor, "n rank"]]:
        read = self.markov_w1(tokens)
        return state, self.gate_proj(torch.cat([_required(hidden), read], -1)).sigmoid() * read


class RecurrentMarkovHead(MarkovHead):
    r"""The same with a state $s$ that has read all tokens since the anchor.

    $[g; c; o] = J [s; W_1[y]; h]$, then $s \leftarrow \sigma(g)\, s + (1 - \sigma(g)) \tanh c$, and $e = \tanh o$.
    """

    def __init__(self, num_tokens: int, num_outputs: int, rank: int, hidden_size: int) -> None:
        super().__init__(num_tokens, num_outputs, rank, hidden_size)
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def step(
        self, state: Float[Tensor, "n rank"], tokens: Int[Tensor, " n"], hidden: Float[Tensor, "n hidden"] | None
    ) -> tuple[Float[Tensor, "n rank"], Float[Tensor, "n rank"]]:
        joint = self.joint_proj(torch.cat([state, self.markov_w1(tokens), _required(hidden)], -1))
        gate, candidate, out = joint.chunk(3, -1)
        kept = gate.sigmoid()
        return kept * state + (1 - kept) * candidate.tanh(), out.tanh()


KINDS: dict[str, type[MarkovHead]] = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RecurrentMarkovHead}
"""The sequential heads by name."""


class ConfidenceHead(nn.Module):
    r"""The probability that a guess is accepted if all before it are: $\sigma(w [h; W_1[y]] + b)$, or
    $\sigma(w h + b)$.

    $h$ is the trunk's output feature of the position that guesses, and $y$ the token before the guess.

    Args:
        hidden_size: Width of the trunk's output features; 0: it reads none.
        rank: Width of $W_1[y]$; 0: it does not read it.
    """

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.proj = nn.Linear(hidden_size + rank, 1)

    def forward(
        self, hidden: Float[Tensor, "*batch hidden"] | None, before: Float[Tensor, "*batch rank"]
    ) -> Float[Tensor, "*batch"]:
        """The logit of that probability."""
        parts = [*([] if hidden is None else [hidden]), *([before] if self.rank else [])]
        logits: Tensor = self.proj(torch.cat(parts, -1).to(self.proj.weight.dtype))
        return logits[..., 0]


class DSparkHead(FusedBlockHead):
    r"""A DFlash head whose guess after $y$ has the logits $U_k + W_2 e(y)$, with $U_k$ those of the trunk.

    So a guess depends on the tokens of the block before it, and the guesses of a block have a joint law.

    References:
        DeepSeek 2026. https://arxiv.org/abs/2607.05147
    """

    name: ClassVar[str] = "dspark"
    architectures: ClassVar[Sequence[str]] = (DEEPSPEC,)
    speculators: ClassVar[str | None] = "DSparkSpeculator"
    speculators_for: ClassVar[Collection[str]] = ("vllm", "llama.cpp")
    projectors: ClassVar[Collection[str]] = ("dspark",)
    unused: ClassVar[Collection[str]] = UNUSED
    anchor_guesses: ClassVar[bool | None] = None

    def __init__(self, config: BlockConfig, embedding_and_head: EmbeddingAndHead, vocab_size: int) -> None:
        self.extra: DSparkSizes = config.extra or DSparkSizes()
        super().__init__(replace(config, extra=self.extra), embedding_and_head, vocab_size)
        kind, rank = self.extra.markov, self.extra.markov_rank
        if rank < 1:
            raise InputError(f"markov_rank must be >= 1, got {rank}; without it the head is dflash")
        if kind not in KINDS:
            raise unknown("sequential head", kind, KINDS)
        width, outputs = config.layers.hidden_size, config.num_outputs or config.layers.vocab_size
        self.markov_head = KINDS[kind](config.layers.vocab_size, outputs, rank, width)
        self.confidence_head: ConfidenceHead | None = None
        if self.extra.confidence is not None:
            self.confidence_head = ConfidenceHead(width, rank if self.extra.confidence == "markov" else 0)

    @classmethod
    def read_config(cls, config: Mapping[str, Any], path: str, hints: CheckpointHints) -> BlockConfig:
        if DEEPSPEC in (config.get("architectures") or ()) and config.keys() >= OF_DEEPSPEC:
            # The class of these files has one answer to two questions that other files leave open.
            known: dict[str, Any] = {} if words_on_causality(config) else {"is_causal": False}
            config = {"sample_from_anchor": True, **config, **known}
        keys = merged(config)
        markov = keys.get("markov_head_type", VANILLA)
        if not isinstance(markov, str):
            raise InputError(f"markov_head_type in config.json of {path} must be a name, got {short(markov)}")
        extra = DSparkSizes(markov=markov, markov_rank=size_in(keys, "markov_rank", path, default=256, least=0))
        return replace(super().read_config(config, path, hints), extra=extra)

    @classmethod
    def rename(cls, tensors: Mapping[str, Tensor], config: BlockConfig) -> dict[str, Tensor]:
        named, (weight, bias) = super().rename(tensors, config), CONFIDENCE
        if weight in named and bias not in named:
            named[bias] = named[weight].new_zeros(1)
        return named

    @classmethod
    def sized(cls, config: BlockConfig, tensors: Mapping[str, Tensor]) -> BlockConfig:
        """What the confidence head reads is seen by the width of its weight."""
        weight, reads = tensors.get(CONFIDENCE[0]), cast("Literal['markov', 'trunk'] | None", None)
        if weight is not None:
            reads = "trunk" if weight.shape[-1] == config.layers.hidden_size else "markov"
        return replace(super().sized(config, tensors), extra=replace(config.extra, confidence=reads))

    def written_keys(self) -> dict[str, Any]:
        extra = self.extra
        return {
            "markov_rank": extra.markov_rank,
            "markov_head_type": extra.markov,
            "enable_confidence_head": extra.confidence is not None,
            "confidence_head_with_markov": extra.confidence == "markov",
        }

    def written_inner(self) -> dict[str, Any]:
        return {**super().written_inner(), "projector_type": self.name}

    def exported(self, engine: str, target: TargetShape, dtype: torch.dtype, name: str) -> HeadFiles:
        """As of all heads. Two engines have one sequential head alone."""
        if self.extra.markov != VANILLA and engine in ("vllm", "llama.cpp"):
            raise InputError(
                f"{engine} reads DSpark heads with the sequential head {VANILLA!r}, and this one is "
                f"{self.extra.markov!r}; train one: outrider train dspark --markov {VANILLA}"
            )
        return super().exported(engine, target, dtype, name)

    @property
    def sequential(self) -> BlockCorrection:
        """What corrects the guesses."""
        return self.markov_head

    @classmethod
    def sizes(cls, options: DSparkOptions) -> dict[str, Any]:
        reads: Any = "markov" if options.confidence else None
        extra = DSparkSizes(markov=options.markov, markov_rank=options.markov_rank, confidence=reads)
        return {"from_anchor": True, "extra": extra}

    def draw(self) -> None:
        super().draw()
        # The head begins as one without it.
        nn.init.zeros_(self.markov_head.markov_w2.weight)

    def states_given_previous(
        self, hidden: Float[Tensor, "*batch depth hidden"], before: Int[Tensor, "*batch depth"]
    ) -> Float[Tensor, "*batch depth inner"]:
        read = self.markov_head.along(before.flatten(0, -2), hidden.flatten(0, -3))
        parts = [hidden, read.unflatten(0, hidden.shape[:-2]).to(hidden.dtype)]
        if self.confidence_head is not None:
            parts.append(self.markov_head.markov_w1(before).to(hidden.dtype))
        return torch.cat(parts, -1)

    def logits_given_previous(self, inner: Float[Tensor, "*batch inner"]) -> Float[Tensor, "*batch vocab"]:
        size, rank = self.config.layers.hidden_size, self.extra.markov_rank
        logits, added = self.logits(inner[..., :size]), self.markov_head(inner[..., size : size + rank])
        width = min(logits.shape[-1], added.shape[-1])
        return logits[..., :width] + added[..., :width]

    def confidence(self, inner: Float[Tensor, "*batch inner"]) -> Float[Tensor, "*batch"] | None:
        if self.confidence_head is None:
            return None
        size, rank = self.config.layers.hidden_size, self.extra.markov_rank
        logits: Tensor = self.confidence_head(inner[..., :size], inner[..., size + rank :])
        return logits


@dataclass(kw_only=True)
class SparkState(BlockState):
    """One request's slot and block, and what the sequential head has read; changes in place.

    Attributes:
        hidden: What `BlockHead.guess_features` returns of the positions that guess; None on tables.
        read: For the root and each expanded node, the state of the sequential head behind it.
        survival: For each of these, how likely a token drawn there is accepted, with all before it; empty without a
            confidence head.
    """

    hidden: Float[Tensor, "depth hidden"] | None = None
    read: dict[int, Float[Tensor, " rank"]] = field(default_factory=dict)
    survival: dict[int, Float[Tensor, ""]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DSparkDrafter(BlockDrafter[SparkState]):
    r"""Guess after a node of token $y$ at depth k with the logits $U_k + W_2 e(y)$, in chains and in trees.

    $U_k$ is the trunk's guess for that depth. $e$ may depend on the tokens between the anchor and $y$ too.

    Attributes:
        markov: The sequential head; None: that of `lm`.
        judge: The confidence head beside `markov`.

    References:
        DeepSeek 2026. https://arxiv.org/abs/2607.05147
    """

    rows: ClassVar[Rows] = "sampled"
    state: ClassVar[type[Any]] = SparkState

    markov: BlockCorrection | None = None
    judge: ConfidenceHead | None = None

    @property
    def estimates(self) -> bool:
        return self._judge is not None

    @torch.inference_mode()
    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess:
        first = 0 if self.from_anchor else 1
        extension = self.run_block(states, depths)
        blocks, features = extension.logits.split(list(depths)), None
        if extension.features is not None:
            before = np.array([state.tokens[-2:][0] for state in states])
            whole = extension.features.unflatten(0, (len(states), self.block_size))
            features = cast(DSparkHead, cast(HeadLM, self.lm).running).guess_features(whole, before)
        for i, (state, block, depth) in enumerate(zip(states, blocks, depths, strict=True)):
            drafter_state = self.state_of(state)
            drafter_state.block, drafter_state.read, drafter_state.survival = block, {}, {}
            if features is not None:
                drafter_state.hidden = features[i, first : first + depth]
        anchors = torch.tensor([state.tokens[-1] for state in states])
        root = np.zeros(len(states), dtype=np.int64)
        logits, read = self._corrected(states, root, anchors, self._head.start(len(states)))
        for state, row in zip(states, read, strict=True):
            self.state_of(state).read[0] = row
        survival = self._survival(states, root, root, root - 1, anchors)
        return Guess(logits=logits, short_list=self.short_list, survival=survival)

    @torch.inference_mode()
    def expand(self, states: Sequence[Running], frontier: Frontier) -> Guess:
        owners = [states[owner] for owner in frontier.owners.tolist()]
        above = zip(owners, frontier.parents.tolist(), strict=True)
        before = torch.stack([self.state_of(owner).read[parent] for owner, parent in above])
        logits, read = self._corrected(owners, frontier.depths, frontier.tokens, before)
        for owner, node, row in zip(owners, frontier.nodes.tolist(), read, strict=True):
            self.state_of(owner).read[node] = row
        survival = self._survival(owners, frontier.depths, frontier.nodes, frontier.parents, frontier.tokens)
        return Guess(logits=logits, short_list=self.short_list, survival=survival)

    def chain(self, states: Sequence[Running], counts: Sequence[int]) -> Follow:
        left, depth = np.array(counts), 0
        read = torch.stack([self.state_of(state).read[0] for state in states])

        @torch.inference_mode()
        def step(tokens: Int[Tensor, " n"]) -> Float[Tensor, "n width"]:
            nonlocal left, depth, read
            if not (left > 0).all():
                read = read[upload([np.flatnonzero(left > 0)], read.device)[0]]
            depth += 1
            alive = [state for state, count in zip(states, counts, strict=True) if count >= depth]
            left = left[left > 0] - 1
            logits, read = self._corrected(alive, np.full(len(alive), depth), tokens, read)
            return logits

        return step

    def on_tables(self, vocab_size: int, seed: int) -> "DSparkDrafter":
        markov = MarkovHead(vocab_size, vocab_size, vocab_size, 0).double()
        judge = ConfidenceHead(0, vocab_size).double()
        dice = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in (*markov.parameters(), *judge.parameters()):
                weight.copy_(torch.randn(weight.shape, generator=dice))
        drafter = cast(DSparkDrafter, super().on_tables(vocab_size, seed))
        return replace(drafter, markov=markov, judge=judge)

    @property
    def _head(self) -> BlockCorrection:
        return self.markov or cast(DSparkHead, cast(HeadLM, self.lm).running).sequential

    @property
    def _judge(self) -> ConfidenceHead | None:
        if self.markov is not None:
            return self.judge
        return getattr(cast(HeadLM, self.lm).running, "confidence_head", None)

    def _survival(
        self,
        states: Sequence[Running],
        depths: Int[np.ndarray, " n"],
        nodes: Int[np.ndarray, " n"],
        parents: Int[np.ndarray, " n"],
        tokens: Int[Tensor, " n"],
    ) -> Float[Tensor, " n"] | None:
        """How likely a token drawn behind each node is accepted, with all before it; None without a confidence head."""
        if (judge := self._judge) is None:
            return None
        markov = cast(MarkovHead, self._head)
        device = judge.proj.weight.device
        chances = judge(self._hidden(states, depths), markov.markov_w1(tokens.to(device, non_blocking=True))).sigmoid()
        survivals = []
        for state, node, parent, chance in zip(states, nodes.tolist(), parents.tolist(), chances, strict=True):
            drafter_state = self.state_of(state)
            drafter_state.survival[node] = chance * drafter_state.survival[parent] if parent >= 0 else chance
            survivals.append(drafter_state.survival[node])
        return torch.stack(survivals)

    def _corrected(
        self,
        states: Sequence[Running],
        depths: Int[np.ndarray, " n"],
        tokens: Int[Tensor, " n"],
        before: Float[Tensor, "n rank"],
    ) -> tuple[Float[Tensor, "n width"], Float[Tensor, "n rank"]]:
        """Guesses after some nodes, and the states of the sequential head behind them.

        Args:
            states: The request of each node.
            depths: The depth of each node.
            tokens: The token of each node.
            before: The state of the sequential head behind its parent.
        """
        pairs = zip(map(self.state_of, states), depths.tolist(), strict=True)
        base = torch.stack([_at(drafter_state.block, depth) for drafter_state, depth in pairs])
        tokens = tokens.to(base.device, non_blocking=True)
        return self._head.corrected(base, before, tokens, self._hidden(states, depths))

    def _hidden(self, states: Sequence[Running], depths: Int[np.ndarray, " n"]) -> Float[Tensor, "n hidden"] | None:
        """The trunk's output at the depth of each node; None where it is not kept."""
        pairs = list(zip(map(self.state_of, states), depths.tolist(), strict=True))
        if any(drafter_state.hidden is None for drafter_state, _ in pairs):
            return None
        return torch.stack([_at(drafter_state.hidden, depth) for drafter_state, depth in pairs])


def _required(hidden: Float[Tensor, "n hidden"] | None) -> Float[Tensor, "n hidden"]:
    if hidden is None:
        raise ValueError("this sequential head reads the trunk's output features")
    return hidden


def _at(rows: Float[Tensor, "depth width"] | None, depth: int) -> Float[Tensor, " width"]:
    if rows is None:
        raise RuntimeError("a block is guessed before its nodes are expanded")
    return rows[depth]


SPEC = HeadSpec(
    name="dspark",
    head=DSparkHead,
    drafter=DSparkDrafter,
    published=DSparkHead.published,
    trained=TrainedBlocks,
    options=DSparkOptions,
    objective=BlockObjective,
    exports=Exports(vllm="dspark", newer_runner=True, sglang="DSPARK", llama="draft-dspark", instead="dflash"),
)
