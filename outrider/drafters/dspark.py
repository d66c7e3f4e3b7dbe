"""A drafter with a DSpark head: a block in one forward, then each guess corrected by the token before it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.core.types import Frontier, Guess, Request, Running
from outrider.drafters.block import BlockState
from outrider.drafters.dflash import TABLE_BLOCK, BlockPath, DFlashDrafter
from outrider.drafters.protocol import Rows
from outrider.drafters.slotted import state_of
from outrider.heads.dflash import Method
from outrider.heads.dspark import ConfidenceHead, DSpark, MarkovHead
from outrider.lm.head import HeadLM
from outrider.lm.tabular import TabularLM, random_rows
from outrider.lm.target_info import TargetInfo
from outrider.trees.chained import Follow


@dataclass(kw_only=True)
class SparkState(BlockState):
    """One request's slot and block, and what the sequential head has read; changes in place.

    Attributes:
        hidden: The trunk's output features of the positions that guess; None on tables.
        read: For the root and each expanded node, the state of the sequential head behind it.
        survival: For each of these, how likely a token drawn there is accepted, with all before it; empty without a
            confidence head.
    """

    hidden: Float[Tensor, "depth hidden"] | None = None
    read: dict[int, Float[Tensor, " rank"]] = field(default_factory=dict)
    survival: dict[int, Float[Tensor, ""]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DSparkDrafter(DFlashDrafter):
    r"""Guess after a node of token $y$ at depth k with the logits $U_k + W_2 e(y)$, in chains and in trees.

    $U_k$ is the trunk's guess for that depth. $e$ may depend on the tokens between the anchor and $y$ too.

    Attributes:
        markov: The sequential head; None: that of `lm`.
        judge: The confidence head beside `markov`.

    References:
        DeepSeek 2026. https://arxiv.org/abs/2607.05147
    """

    rows: ClassVar[Rows] = "sampled"
    trainer: ClassVar[str | None] = "dspark"
    exports: ClassVar[tuple[str, ...]] = ("dspark",)

    markov: MarkovHead | None = None
    judge: ConfidenceHead | None = None

    @property
    def estimates(self) -> bool:
        return self._judge is not None

    def open(self, request: Request) -> SparkState:
        return SparkState(slot=self.lm.open())

    @torch.inference_mode()
    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess:
        first = 0 if self.from_anchor else 1
        extension = self.block(states, depths)
        blocks = extension.logits.split(list(depths))
        for i, (state, block, depth) in enumerate(zip(states, blocks, depths, strict=True)):
            own = _own(state)
            own.block, own.read, own.survival = block, {}, {}
            if extension.features is not None:
                begin = i * self.block_size + first
                own.hidden = extension.features[begin : begin + depth]
        anchors = torch.tensor([state.tokens[-1] for state in states])
        root = np.zeros(len(states), dtype=np.int64)
        logits, read = self._corrected(states, root, anchors, self._head.start(len(states)))
        for state, row in zip(states, read, strict=True):
            _own(state).read[0] = row
        survival = self._survival(states, root, root, root - 1, anchors)
        return Guess(logits=logits, short_list=self.short_list, survival=survival)

    @torch.inference_mode()
    def expand(self, states: Sequence[Running], frontier: Frontier) -> Guess:
        owners = [states[owner] for owner in frontier.owners.tolist()]
        above = zip(owners, frontier.parents.tolist(), strict=True)
        before = torch.stack([_own(owner).read[parent] for owner, parent in above])
        logits, read = self._corrected(owners, frontier.depths, frontier.tokens, before)
        for owner, node, row in zip(owners, frontier.nodes.tolist(), read, strict=True):
            _own(owner).read[node] = row
        survival = self._survival(owners, frontier.depths, frontier.nodes, frontier.parents, frontier.tokens)
        return Guess(logits=logits, short_list=self.short_list, survival=survival)

    def chain(self, states: Sequence[Running], counts: Sequence[int]) -> Follow:
        left, depth = np.array(counts), 0
        read = torch.stack([_own(state).read[0] for state in states])

        @torch.inference_mode()
        def step(tokens: Int[Tensor, " n"]) -> Float[Tensor, "n width"]:
            nonlocal left, depth, read
            if not (left > 0).all():
                read = read[torch.from_numpy(np.flatnonzero(left > 0)).to(read.device)]
            depth += 1
            alive = [state for state, count in zip(states, counts, strict=True) if count >= depth]
            left = left[left > 0] - 1
            logits, read = self._corrected(alive, np.full(len(alive), depth), tokens, read)
            return logits

        return step

    def reuse(self, state: object, request: Request, length: int) -> SparkState:
        return SparkState(slot=super().reuse(state, request, length).slot)

    def fork(self, state: object, request: Request, length: int) -> SparkState:
        return SparkState(slot=super().fork(state, request, length).slot)

    def on_tables(self, vocab_size: int, seed: int) -> "DSparkDrafter":
        markov = MarkovHead(vocab_size, vocab_size, vocab_size, 0).double()
        judge = ConfidenceHead(0, vocab_size).double()
        dice = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in (*markov.parameters(), *judge.parameters()):
                weight.copy_(torch.randn(weight.shape, generator=dice))
        return DSparkDrafter(
            lm=TabularLM(random_rows(vocab_size, seed), vocab_size),
            block_size=TABLE_BLOCK,
            mask_id=0,
            from_anchor=self.from_anchor,
            tapped=(0,),
            markov=markov,
            judge=judge,
        )

    @property
    def _head(self) -> MarkovHead:
        return self.markov or cast(DSpark, cast(HeadLM, self.lm).running).markov_head

    @property
    def _judge(self) -> ConfidenceHead | None:
        if self.markov is not None:
            return self.judge
        return cast(DSpark, cast(HeadLM, self.lm).running).confidence_head

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
        pairs = list(zip(map(_own, states), depths.tolist(), strict=True))
        hidden = None
        if all(own.hidden is not None for own, _ in pairs):
            hidden = torch.stack([_at(own.hidden, depth) for own, depth in pairs])
        device = judge.proj.weight.device
        chances = judge(hidden, self._head.markov_w1(tokens.to(device, non_blocking=True))).sigmoid()
        found = []
        for (own, _), node, parent, chance in zip(pairs, nodes.tolist(), parents.tolist(), chances, strict=True):
            own.survival[node] = chance * own.survival[parent] if parent >= 0 else chance
            found.append(own.survival[node])
        return torch.stack(found)

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
        pairs = list(zip(map(_own, states), depths.tolist(), strict=True))
        base = torch.stack([_at(own.block, depth) for own, depth in pairs])
        hidden = None
        if all(own.hidden is not None for own, _ in pairs):
            hidden = torch.stack([_at(own.hidden, depth) for own, depth in pairs])
        after, read = self._head.step(before, tokens.to(base.device, non_blocking=True), hidden)
        added = self._head(read)
        return base + added[:, : base.shape[1]], after


@dataclass(frozen=True, kw_only=True)
class DSparkPath(BlockPath):
    """A DSpark head before it is bound to a target: `dspark:path=...`. Its fields are those of `BlockPath`."""

    method: ClassVar[Method] = "dspark"

    def bind(self, target_info: TargetInfo) -> DSparkDrafter:
        """Load the head."""
        return DSparkDrafter(**self.read(target_info))


def _at(rows: Float[Tensor, "depth width"] | None, depth: int) -> Float[Tensor, " width"]:
    if rows is None:
        raise RuntimeError("a block is guessed before its nodes are expanded")
    return rows[depth]


def _own(state: Running) -> SparkState:
    return state_of(SparkState, state.drafter_state)
