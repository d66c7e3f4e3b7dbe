"""Heads that guess from the target's newest hidden state (Medusa and others): modules, drafters, and the objective."""

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from outrider.core.types import Guess, Request, Running, ShortList
from outrider.drafters.marginal import MarginalDrafter
from outrider.drafters.protocol import Observed
from outrider.drafters.stateful import StatefulDrafter
from outrider.heads.head import Head, TrainedHead
from outrider.heads.objective import GuessObjective, LearntPositions
from outrider.learning.batch import TrainBatch
from outrider.learning.options import HeadOptions, loss
from outrider.lm.forwards.packed import packed
from outrider.lm.head import suited
from outrider.lm.hf.checkpoint import read_tensors
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead
from outrider.lm.target_info import TargetInfo
from outrider.trees.fixed import likeliest_topology


@dataclass(kw_only=True)
class LastState:
    """What a drafter keeps of a request; changes in place.

    Attributes:
        num_seen: How many of its positions were observed.
        newest: The target's hidden state at the last observed position; None before any.
    """

    num_seen: int = 0
    newest: Float[Tensor, " hidden"] | None = None


Last = TypeVar("Last", bound=LastState)


@dataclass(frozen=True, kw_only=True)
class LastStateDrafter(StatefulDrafter[Last]):
    """Keep the target's hidden state at the last position before the anchor: $f_n$, from which the target drew the
    anchor $x_{n+1}$.

    Attributes:
        tap: The hidden state that `observe` gets.
        norm: The target's final norm; the identity where an earlier state is read.
    """

    context_pure: ClassVar[bool] = False
    state: ClassVar[type[Any]] = LastState

    tap: int
    norm: Callable[[Tensor], Tensor] = field(compare=False, default=nn.Identity())

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.tap,)

    def features(self, hidden: Float[Tensor, "n hidden"]) -> Float[Tensor, "n hidden"]:
        """What is read of the kept states; by default these states, normed."""
        return self.norm(hidden)

    def open(self, request: Request) -> Last:
        return self.state()

    def observe(self, states: Sequence[Running], observed: Observed) -> None:
        counts = observed.counts()
        for i, newest in observed.newest(observed.taps[self.tap]).items():
            drafter_state = self.state_of(states[i])
            drafter_state.num_seen += counts[i]
            drafter_state.newest = newest

    def needs(self, state: object, length: int) -> int:
        seen = self.checked(state).num_seen
        # Only the state of the last position is kept.
        return seen if seen <= length else max(0, length - 1)

    def reuse(self, state: object, request: Request, length: int) -> Last:
        drafter_state = self.checked(state)
        return self.state(
            num_seen=self.needs(drafter_state, length),
            newest=drafter_state.newest if drafter_state.num_seen <= length else None,
        )

    def fork(self, state: object, request: Request, length: int) -> Last:
        return LastStateDrafter.reuse(self, state, request, length)

    def newest(self, states: Sequence[Running]) -> Float[Tensor, "n hidden"]:
        """What the next draft of each request is guessed from."""
        kept = [self.state_of(state).newest for state in states]
        known = [each for each in kept if each is not None]
        if len(known) < len(kept):
            raise RuntimeError("this drafter guesses from a hidden state, and none was observed")
        return self.features(torch.stack(known))


class LastStateHead(Head):
    """Guesses some tokens from one hidden state of the target, without keys and values.

    Attributes:
        max_depth: Most tokens that it guesses.
        embedding_and_head: The target's embedding, final norm and output layer, where it uses them.
    """

    max_depth: int
    embedding_and_head: EmbeddingAndHead | None = None

    @property
    @abstractmethod
    def weight(self) -> Float[Tensor, "_ _"]:
        """A weight whose device and dtype are those of all tensors."""

    @abstractmethod
    def on_tables(self, vocab_size: int, seed: int) -> "LastStateHead":
        """A small head of this kind with random weights in float64 and as many guesses, for proofs."""


Own = TypeVar("Own", bound="LastStateHeadDrafter")


@dataclass(frozen=True, kw_only=True)
class LastStateHeadDrafter(LastStateDrafter[Last]):
    """Guess by a `LastStateHead`.

    Attributes:
        head: The head.
        running: Its packed twin, which computes in its place; None: it computes itself.
        vocab_size: Width of the target's logits.
    """

    head: LastStateHead
    running: LastStateHead | None = field(compare=False, default=None)
    vocab_size: int

    @classmethod
    def of(cls, head: LastStateHead, target: TargetInfo, trained: TrainedHead) -> "LastStateHeadDrafter":
        """The drafter with a head, where the user wants it."""
        return cls(**cls.fields_of(head, target, trained))

    @classmethod
    def fields_of(cls, head: LastStateHead, target: TargetInfo, trained: TrainedHead) -> dict[str, Any]:
        """The fields that all drafters with such a head have."""
        placed = head.to(*trained.place(target)).eval().requires_grad_(False)
        [tap] = placed.reads(target.num_layers)
        return {
            "head": placed,
            "running": packed(placed) if suited(target.target_forward, placed) == "packed" else None,
            "tap": tap,
            "vocab_size": target.vocab_size,
            "norm": target.norm if tap == target.num_layers else nn.Identity(),
        }

    @property
    def max_depth(self) -> int:
        return self.head.max_depth

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        return {"head": self.head}

    @property
    def computing(self) -> Any:
        """What computes: the head, or its packed twin."""
        return self.running or self.head

    def cast(self: Own, target_info: TargetInfo) -> Own:
        head = copy.deepcopy(self.head).to(target_info.dtype)
        if head.embedding_and_head is not None:
            head.embedding_and_head = target_info.embedding_and_head()
        norm = self.norm if isinstance(self.norm, nn.Identity) else target_info.norm
        return replace(self, head=head, running=None, norm=norm)

    def on_tables(self: Own, vocab_size: int, seed: int) -> Own:
        head = self.head.on_tables(vocab_size, seed)
        return replace(self, head=head, running=None, tap=0, vocab_size=vocab_size, norm=nn.Identity())


@torch.no_grad()
def randomise(module: nn.Module, seed: int) -> None:
    """Draw all weights anew, for proofs on tables."""
    dice = torch.Generator().manual_seed(seed)
    for weight in module.parameters():
        weight.copy_(torch.randn(weight.shape, generator=dice, dtype=torch.float64))


class StateHeads(LastStateHead):
    r"""Head $i = 0, 1, \ldots$ reads the target's normed last hidden state at $t$ and guesses $x_{t+2+i}$; the target
    itself has said $x_{t+1}$.

    Attributes:
        ids: The tokens that the heads can guess, ascending; None: all.
    """

    ids: Tensor | None = None

    @abstractmethod
    def forward(self, hidden: Float[Tensor, "*batch hidden"], number: int) -> Float[Tensor, "*batch hidden"]:
        """What a head's output layer reads."""

    @abstractmethod
    def logits(self, hidden: Float[Tensor, "*batch hidden"], number: int) -> Float[Tensor, "*batch width"]:
        """A head's logits, from what `forward` returns."""


@dataclass(kw_only=True)
class HeadsState(LastState):
    """What such heads keep of a request; changes in place.

    Attributes:
        rows: Logits for the depths of the last draft.
    """

    rows: Float[Tensor, "depth width"] | None = None


Heads = TypeVar("Heads", bound=HeadsState)


@dataclass(frozen=True, kw_only=True)
class StateHeadsDrafter(MarginalDrafter, LastStateHeadDrafter[Heads]):
    r"""Guess all tokens behind the anchor at once, one row per depth, from one hidden state.

    The state is that of the last position before the anchor: $f_n$, from which the target drew the anchor $x_{n+1}$.
    Head $i$ guesses $x_{n+2+i}$ from it, and reads neither the anchor nor the other guesses.
    """

    state: ClassVar[type[Any]] = HeadsState

    head: StateHeads

    @classmethod
    def fields_of(cls, head: LastStateHead, target: TargetInfo, trained: TrainedHead) -> dict[str, Any]:
        fields = super().fields_of(head, target, trained)
        ids = fields["head"].ids
        return fields | {"short_list": None if ids is None else ShortList.of(ids, target.vocab_size)}

    @torch.inference_mode()
    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess:
        weight, heads = self.head.weight, self.computing
        hidden = self.newest(states).to(weight.device, weight.dtype, non_blocking=True)
        numbers = range(min(max(depths), self.max_depth))
        rows = torch.stack([heads.logits(heads(hidden, i), i) for i in numbers], 1)
        rows = rows[..., : self.vocab_size] if self.short_list is None else rows
        for state, own_rows in zip(states, rows, strict=True):
            self.state_of(state).rows = own_rows
        return Guess(logits=rows[:, 0], short_list=self.short_list)

    def guessed(self, state: Running) -> Float[Tensor, "depth width"] | None:
        return self.state_of(state).rows

    def on_tables(self: Own, vocab_size: int, seed: int) -> Own:
        small: Any = super().on_tables(vocab_size, seed)
        drafter: Own = replace(small, short_list=None)
        return drafter


@dataclass(frozen=True, kw_only=True)
class StateHeadsOptions(HeadOptions):
    """What heads that all guess from one state can be told. There are as many heads as --depth says.

    Attributes:
        decay: The weight of each draft token in the loss, as a share of the weight of the token before it.
        tree_nodes: Draft nodes of the tree that is found from the heads' accuracies.
    """

    decay: float = loss(0.8, above=0)
    tree_nodes: int = 24


class StateHeadsObjective(GuessObjective):
    """Heads that learn from a target, each for itself. The target stays as it is."""

    head: StateHeads
    options: StateHeadsOptions

    @property
    def num_guesses(self) -> int:
        """The number of heads."""
        return self.head.max_depth

    @property
    def most_guesses(self) -> int:
        """The number of heads."""
        return self.num_guesses

    def guesses(self, batch: TrainBatch, count: int) -> Iterator[Float[Tensor, "rows length hidden"]]:
        """What head 0, 1, ..., `count - 1` makes of each state."""
        hidden = self.last_states(batch).to(self.head.weight.dtype)
        for number in range(count):
            yield self.head(hidden, number)

    def logits(self, hidden: Float[Tensor, "*batch hidden"], number: int) -> Float[Tensor, "*batch width"]:
        """Logits of a head."""
        return self.head.logits(hidden, number)

    def findings(self, out: Path, batches: Iterable[TrainBatch]) -> Mapping[str, str]:
        """The tree that fits the accuracies of the heads that were kept."""
        self.head.load_state_dict(read_tensors(str(out)))
        here = (batch.to(self.head.weight.device) for batch in batches)
        accuracies = self.accuracies(here, greedy=not self.context.watch_temperature)
        children = likeliest_topology(accuracies, self.options.tree_nodes)
        return {"tree": f"fixed:children={'x'.join(map(str, children))},chosen=true"}

    @torch.no_grad()
    def accuracies(
        self, batches: Iterable[TrainBatch], *, ranks: int = 10, greedy: bool
    ) -> Float[np.ndarray, "heads ranks"]:
        """How often a head's likeliest, second likeliest, ... token is the one that comes.

        Args:
            greedy: The token that comes is the target's likeliest one; otherwise it is the text's.
        """
        ids = self._ids_on(self.head.weight.device)
        ranks = min(ranks, self.shape.vocab_size if ids is None else len(ids))
        hits, counts = np.zeros((self.num_guesses, ranks)), np.zeros((self.num_guesses, 1))
        for data in batches:
            batch = self.with_states(data)
            for number, hidden in enumerate(self.guesses(batch, self.num_guesses)):
                places = LearntPositions.of(batch, number)
                picked, target = hidden[places.rows, places.at], self._target_logits(batch, number, places)
                for begin in range(0, len(places.labels), self.chunk):
                    rows = slice(begin, begin + self.chunk)
                    likeliest = self.logits(picked[rows], number).topk(ranks, -1).indices
                    tokens = likeliest if ids is None else ids[likeliest]
                    comes = target(rows).argmax(-1) if greedy else places.labels[rows]
                    hits[number] += (tokens == comes[:, None]).sum(0).cpu().numpy()
                counts[number] += len(places.labels)
        return hits / counts.clip(min=1)
