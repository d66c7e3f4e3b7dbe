"""Medusa heads: every depth of a draft is guessed from the target's last hidden state (Cai et al. 2024)."""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from outrider.drafters.head_path import HeadPath
from outrider.drafters.newest import NewestDrafter, NewestState, newest_state
from outrider.drafters.protocol import Rows, Surroundings
from outrider.heads.files import TargetShape, read_config
from outrider.heads.medusa import MedusaConfig, MedusaHeads, is_medusa, read_medusa
from outrider.lm.tabular import TABLE_FEATURES
from outrider.trees.chained import Follow
from outrider.types import Frontier, Guess, InputError, Request, Running, ShortList


@dataclass(kw_only=True)
class MedusaState(NewestState):
    """What Medusa heads keep of a request; changes in place. The hidden state is what leaves the target's last layer.

    Attributes:
        rows: Logits for the depths of the last draft.
    """

    rows: Float[Tensor, "depth width"] | None = None


@dataclass(frozen=True, kw_only=True)
class MedusaDrafter(NewestDrafter):
    r"""Guess all tokens behind the anchor at once, one row per depth, from one hidden state.

    The state is that of the last position before the anchor: $f_n$, from which the target drew the anchor $x_{n+1}$.
    Head $i$ guesses $x_{n+2+i}$ from it, and reads neither the anchor nor the other guesses.

    Attributes:
        heads: The heads.
        norm: The target's final norm, which the heads' input has passed.
        short_list: The tokens that the heads can guess; None: all.

    References:
        Cai et al. 2024. https://arxiv.org/abs/2401.10774
    """

    rows: ClassVar[Rows] = "marginal"
    context_pure: ClassVar[bool] = False
    trainer: ClassVar[str | None] = "medusa"
    exports: ClassVar[tuple[str, ...]] = ("medusa",)

    heads: MedusaHeads
    vocab_size: int
    norm: Callable[[Tensor], Tensor] = field(compare=False, default=nn.Identity())
    short_list: ShortList | None = None

    @property
    def max_depth(self) -> int:
        return self.heads.config.num_heads

    @property
    def device(self) -> torch.device:
        return self.heads.weight.device

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        return {"heads": self.heads}

    def open(self, request: Request) -> MedusaState:
        return MedusaState()

    @torch.inference_mode()
    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess:
        hidden = self.norm(self.newest(states)).to(self.heads.weight.device, self.heads.weight.dtype, non_blocking=True)
        numbers = range(min(max(depths), self.max_depth))
        rows = torch.stack([self.heads.logits(self.heads(hidden, i), i) for i in numbers], 1)
        rows = rows[..., : self.vocab_size] if self.short_list is None else rows
        for state, own_rows in zip(states, rows, strict=True):
            _own(state).rows = own_rows
        return Guess(logits=rows[:, 0], short_list=self.short_list)

    def expand(self, states: Sequence[Running], frontier: Frontier) -> Guess:
        pairs = zip(frontier.owners.tolist(), frontier.depths.tolist(), strict=True)
        rows = [_rows(states[owner])[depth] for owner, depth in pairs]
        return Guess(logits=torch.stack(rows), short_list=self.short_list)

    def chain(self, states: Sequence[Running], counts: Sequence[int]) -> Follow:
        depths = iter(range(1, max(counts) + 1))

        def step(tokens: Int[Tensor, " n"]) -> Float[Tensor, "n width"]:
            depth = next(depths)
            pairs = zip(states, counts, strict=True)
            return torch.stack([_rows(state)[depth] for state, count in pairs if count >= depth])

        return step

    def cast(self, surroundings: Surroundings) -> "MedusaDrafter":
        heads = copy.deepcopy(self.heads).to(surroundings.dtype)
        return replace(self, heads=heads, norm=surroundings.norm)

    def on_tables(self, vocab_size: int, seed: int) -> "MedusaDrafter":
        config = MedusaConfig(hidden_size=TABLE_FEATURES, vocab_size=vocab_size, num_heads=self.max_depth)
        heads = MedusaHeads(config).double().eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in heads.parameters():
                weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64))
        return MedusaDrafter(heads=heads, tap=0, vocab_size=vocab_size)


@dataclass(frozen=True, kw_only=True)
class MedusaPath(HeadPath):
    """Medusa heads before they are bound to a target: `medusa:path=...`."""

    @classmethod
    def recognises(cls, config: Mapping[str, Any], names: Collection[str]) -> bool:
        return is_medusa(config)

    def bind(self, surroundings: Surroundings) -> MedusaDrafter:
        """Load the heads."""
        config = read_config(self.path, revision=self.revision)
        heads = read_medusa(self.path, vocab_size=surroundings.vocab_size, revision=self.revision)
        sizes = heads.config
        self.check_target(TargetShape.of(config, self.path), sizes.hidden_size, surroundings)
        self.check_vocabulary(sizes.vocab_size, surroundings)
        if heads.token_map is None:
            self.check_vocabulary(sizes.width, surroundings)
        device, dtype = self.place(surroundings)
        heads = heads.to(device, dtype).requires_grad_(False)
        chosen = heads.token_map
        if chosen is not None and int(chosen.max()) >= surroundings.vocab_size:
            raise InputError(f"token_map in {self.path} names tokens that this target does not have")
        return MedusaDrafter(
            heads=heads,
            tap=surroundings.num_layers,
            vocab_size=surroundings.vocab_size,
            norm=surroundings.norm,
            short_list=None if chosen is None else ShortList.of(chosen, surroundings.vocab_size),
        )


def _rows(state: Running) -> Float[Tensor, "depth width"]:
    rows = _own(state).rows
    if rows is None:
        raise RuntimeError("rows are guessed before nodes are expanded")
    return rows


def _own(state: Running) -> MedusaState:
    return newest_state(MedusaState, state.drafter_state)
