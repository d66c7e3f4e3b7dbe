"""A drafter's head as a small language model: the module is the mathematics; slots and masks are added here."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, cast, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from outrider.lm.anatomy import Span
from outrider.lm.attention import MaskBuilder
from outrider.lm.cache import Probe
from outrider.lm.compiled import compiled_head
from outrider.lm.forward import Forward
from outrider.lm.packed import fits_packed, keeps_bits, packed
from outrider.lm.slots import Slots
from outrider.lm.slotted import Inputs, Outputs, SlottedLM
from outrider.types import InputError


@runtime_checkable
class Keeper(Protocol):
    """Stores keys and values of a head's attention layers. Drafting uses a slot cache; training uses another."""

    def update(
        self, keys: Float[Tensor, "rows heads width dim"], values: Float[Tensor, "rows heads width dim"], layer_idx: int
    ) -> tuple[Float[Tensor, "rows heads keys dim"], Float[Tensor, "rows heads keys dim"]]:
        """Store the new keys and values of a layer. Returns all keys and values that its queries may see."""
        ...


@runtime_checkable
class HeadModule(Protocol):
    """A torch module that drafts from tokens and features.

    Attributes:
        feature_size: Width of the features that it reads; 0 where it reads tokens alone.
        vocab_size: Width of its logits.
    """

    feature_size: int
    vocab_size: int

    def __call__(
        self,
        tokens: Int[Tensor, "rows width"],
        features: Float[Tensor, "rows width dim"] | None,
        positions: Int[Tensor, "rows width"],
        mask: Bool[Tensor, "rows 1 width keys"],
        cache: Keeper,
    ) -> Float[Tensor, "rows width hidden"]:
        """The head's output features of each node.

        Args:
            features: None if the nodes have none, as the unknown positions of a block.
            mask: Which keys of the cache each node sees, the new ones included.
        """
        ...

    def logits(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch vocab"]:
        """Logits of the next token, from output features."""
        ...


class HeadLM(SlottedLM):
    """A head behind the `LM` protocol. Its extensions hold logits, and the head's output features of all nodes.

    Attributes:
        module: The head.
        running: What computes: the head, or its packed twin.
        forward: How its forwards run.

    Args:
        module: The head, on one device.
        max_slots: Most slots at once.
        max_context: Most tokens of one slot.
        forward: How its forwards run: `eager`; `packed`, with linear layers laid out for the CPU's kernels, see
            `packed`; `compiled` by torch when they are first called. With the last two the weights must not change
            afterwards. `suited` says which of them a head can have.

    Raises:
        InputError: The cache does not fit in memory.
    """

    num_taps = 0

    def __init__(self, module: nn.Module, *, max_slots: int, max_context: int, forward: Forward = "eager") -> None:
        if not isinstance(module, HeadModule):
            raise InputError(f"{type(module).__name__} is no head: it needs feature_size, vocab_size and logits()")
        self.module = module.eval()
        weight = next(module.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self.vocab_size, self.hidden_size = module.vocab_size, module.feature_size
        compiled, self.forward = forward == "compiled", forward
        self.pad_to, self.num_forwards = 2 if compiled else 1, 0
        self.running = cast(HeadModule, packed(module) if forward == "packed" else module)
        self._run: Callable[..., Tensor] = compiled_head(module) if compiled else self.running
        self._doubling = compiled and self.device.type == "cuda"
        self._builder = MaskBuilder(spans=getattr(module, "span", Span()), additive=None, device=self.device)
        probe = Probe()
        self._probe(probe)
        self._slots = Slots.fitting(
            probe.layers,
            max_slots=max_slots,
            max_context=max_context,
            limit=None,
            device=self.device,
            num_rows=2 if compiled else 1,
        )

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """The head."""
        return {"head": self.module}

    def cast(self, dtype: torch.dtype) -> "HeadLM":
        """A copy in another dtype, uncompiled. Returns itself if it already has that dtype."""
        if self.dtype in (dtype, torch.float64):
            return self
        module = copy.deepcopy(self.module).to(dtype)
        return HeadLM(module, max_slots=self.max_slots, max_context=self.max_context)

    def _forward(self, inputs: Inputs, taps: Sequence[int]) -> Outputs:
        batch, columns = inputs.batch, inputs.columns
        tokens, positions = batch.tokens(self.device), inputs.positions
        if self.forward == "compiled":
            # Where a view begins would become part of a graph.
            tokens, positions = tokens.clone(), positions.clone()
        hidden = self._run(tokens, batch.features(self.device, self.dtype), positions, inputs.masks, inputs.window)
        wanted = hidden if len(columns) == batch.width else hidden[:, torch.from_numpy(columns).to(self.device)]
        # Most forwards of prompts want no logits.
        logits = self.running.logits(wanted) if len(columns) else hidden.new_zeros(len(hidden), 0, self.vocab_size)
        return Outputs(logits=logits, columns=columns, features=hidden)

    @torch.inference_mode()
    def _probe(self, probe: Probe) -> None:
        """Let the probe record what each layer caches, by a forward of two tokens."""
        positions = torch.arange(2, device=self.device)[None]
        features = torch.zeros(1, 2, self.module.feature_size, dtype=self.dtype, device=self.device)
        mask = self._builder.masks(None, positions, 2)
        self.module(torch.zeros_like(positions), features if features.shape[-1] else None, positions, mask, probe)


def suited(target: Forward, module: nn.Module) -> Forward:
    """How a head's forwards run beside a target whose forwards run in some way.

    On a CPU a head is packed where the target is packed or compiled, if the result stays the same to the bit. Elsewhere
    it runs eagerly: torch compiles a head for each shape when it is first called, which takes longer than most runs.
    """
    weight = next(module.parameters())
    packs = target != "eager" and keeps_bits(weight.device, weight.dtype) and fits_packed(module, weight.device)
    return "packed" if packs else "eager"


def sees_all(count: int, before: int = 0) -> Bool[np.ndarray, "count pending"]:
    """The `sees` of a block whose nodes all see each other, and no earlier pending node.

    Example:
        >>> sees_all(2, before=1)
        array([[False,  True,  True],
               [False,  True,  True]])
    """
    return np.concatenate([np.zeros((count, before), dtype=bool), np.ones((count, count), dtype=bool)], 1)
