"""A drafter's head as a small language model: the module is the mathematics; slots and masks are added here."""

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Protocol, cast, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from outrider.core.types import InputError
from outrider.lm.forwards.compilable import KINDS, CompilableHead, ForwardKind
from outrider.lm.forwards.forward import Forward
from outrider.lm.forwards.grouped import read_grouped
from outrider.lm.forwards.package import Package, PackagedForward
from outrider.lm.forwards.packed import fits_packed, packed, packs
from outrider.lm.forwards.recorder import RECORDERS
from outrider.lm.forwards.replayed import ReplayedForward
from outrider.lm.hf.anatomy import Span
from outrider.lm.protocol import Segment
from outrider.lm.slots.batch import upload
from outrider.lm.slots.cache import Probe
from outrider.lm.slots.head_inputs import HeadInputs
from outrider.lm.slots.inputs import Inputs, Outputs
from outrider.lm.slots.masks import MaskBuilder
from outrider.lm.slots.slots import Slots
from outrider.lm.slots.slotted import SlottedLM

COMPILED = 64
"""Most tokens of a compiled forward. Longer forwards read prompts and are rare."""
_TOLERANCE = 0.1
"""How far a library may be from the head, of the range of what the head says: half precision rounds coarsely."""
log = logging.getLogger("outrider")


def attend(
    queries: Float[Tensor, "rows heads width dim"],
    keys: Float[Tensor, "rows shared keys dim"],
    values: Float[Tensor, "rows shared keys dim"],
    mask: Bool[Tensor, "rows 1 width keys"],
) -> Float[Tensor, "rows heads width dim"]:
    """What queries read from the keys that they see. `shared` is the number of key heads; it divides `heads`.

    On GPUs torch's fast kernels take no mask beside keys that several heads share.
    """
    if queries.device.type != "cpu" and queries.shape[1] != keys.shape[1]:
        return read_grouped(queries, keys, values, mask)
    return scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)


@runtime_checkable
class HeadModule(Protocol):
    """A torch module that drafts from tokens and features.

    Attributes:
        feature_size: Width of the features that it reads; 0 where it reads tokens alone.
        vocab_size: Width of its logits.
    """

    feature_size: int
    vocab_size: int

    def __call__(self, inputs: HeadInputs) -> Float[Tensor, "rows width hidden"]:
        """The head's output features of each node."""
        ...

    def logits(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch vocab"]:
        """Logits of the next token, from output features."""
        ...


class EagerHead:
    """A head's forwards, operation by operation.

    Args:
        module: What computes.
        vocab_size: Width of its logits.
    """

    def __init__(self, module: HeadModule, vocab_size: int) -> None:
        self._module, self._vocab_size = module, vocab_size
        weight = next(cast(nn.Module, module).parameters())
        self._device, self._dtype = weight.device, weight.dtype

    def __call__(self, inputs: Inputs, taps: Sequence[int]) -> Outputs:
        """The logits, and the output features of all nodes; there are no taps."""
        batch, columns = inputs.batch, inputs.columns
        tokens, features = batch.tokens(self._device), batch.features(self._device, self._dtype)
        hidden = self._module(_read(inputs, tokens, features))
        wanted = hidden if len(columns) == batch.width else hidden[:, upload([columns], self._device)[0]]
        # Most forwards of prompts want no logits.
        logits = self._module.logits(wanted) if len(columns) else hidden.new_zeros(len(hidden), 0, self._vocab_size)
        return Outputs(logits=logits, columns=columns, features=hidden)


class HeadLM(SlottedLM):
    """A head behind the `LM` protocol. Its extensions hold logits, and the head's output features of all nodes.

    Attributes:
        module: The head.
        running: What computes: the head, or its packed twin. Compiled forwards take its place where there are some.
        forward: How its forwards run.

    Args:
        module: The head, on one device.
        max_slots: Most slots at once.
        max_context: Most tokens of one slot; fewer if memory is short.
        forward: How its forwards run: `eager`; `packed`, with linear layers laid out for the CPU's kernels, see
            `packed`; `compiled` from libraries on disk on a CPU, see `package`; `replayed` as CUDA graphs on a
            GPU, see `replayed`. With `packed` and `compiled` the weights must not change afterwards.

    Raises:
        InputError: The cache does not fit in memory, or the head cannot run so here.
    """

    num_taps = 0

    def __init__(self, module: nn.Module, *, max_slots: int, max_context: int, forward: Forward = "eager") -> None:
        if not isinstance(module, HeadModule):
            raise InputError(f"{type(module).__name__} is no head: it needs feature_size, vocab_size and logits()")
        self.module = module.eval()
        weight = next(module.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self.vocab_size, self.hidden_size = module.vocab_size, module.feature_size
        if forward == "compiled" and self.device.type != "cpu":
            raise InputError(f"forward=compiled is for CPUs, and a head is on {self.device}; choose forward=replayed")
        if forward == "replayed" and self.device.type not in RECORDERS:
            raise InputError(f"forward=replayed is for GPUs, and a head is on {self.device}; choose forward=eager")
        self.forward, self.pad_to, self.num_forwards = forward, 1, 0
        copied = forward == "packed" or (forward == "compiled" and _packable(module))
        self.running = cast(HeadModule, packed(module) if copied else module)
        self._eager = EagerHead(self.running, self.vocab_size)
        self._compiled: PackagedForward | None = None
        self._builder = MaskBuilder(spans=getattr(module, "span", Span()), additive=None, device=self.device)
        probe = Probe()
        self._probe(probe)
        self._slots = Slots.fitting(
            probe.layers,
            max_slots=max_slots,
            max_context=None,
            limit=max_context,
            device=self.device,
            num_rows=2 if forward == "compiled" else 1,
        )
        self._replaying = self._replayed = self._recorded() if forward == "replayed" else None
        if forward == "compiled":
            self.prepare()

    def _recorded(self) -> ReplayedForward:
        """Its replayed forwards."""
        head, embedding_and_head = self.module, getattr(self.module, "embedding_and_head", None)
        modules = [head] if embedding_and_head is None else [head, embedding_and_head.modules]
        return ReplayedForward(
            self._eager,
            name=type(head).__name__,
            cache=self.cache,
            modules=lambda: modules,
            vocab_size=self.vocab_size,
        )

    @property
    def packages(self) -> Sequence[Package]:
        """The libraries of its forwards, one for each kind."""
        kinds: Sequence[ForwardKind] = getattr(self.module, "kinds", KINDS)
        of, storages, entries = CompilableHead(head=self.module), self.cache.storages, self.cache.entries
        return [Package(of=of, kind=kind, builder=self._builder, storages=storages, entries=entries) for kind in kinds]

    @property
    def num_compiled_forwards(self) -> int:
        """Number of forwards so far that were computed by a library or replayed."""
        return sum(runs.num_forwards for runs in (self._replayed, self._compiled) if runs is not None)

    def prepare(self) -> None:
        """Make the libraries of its forwards, if they are not there, and run by them from now on.

        Raises:
            InputError: One of them cannot be made, or does not say what the head says.
        """
        packages = self.packages
        compiled = PackagedForward(packages[0])
        for package in packages:
            compiled.prepare(package.kind)
        for package in packages:
            if (difference := self._difference(package.kind, compiled)) > _TOLERANCE:
                raise InputError(
                    f"the compiled forward of {type(self.module).__name__} does not say what the head says (they "
                    f"differ by {difference:.2g} of the range); choose forward=eager"
                )
        compiled.num_forwards = 0
        self._compiled, self.forward = compiled, "compiled"

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
        if self._replayed is not None:
            return self._replayed(inputs, taps)
        kind = ForwardKind(features=inputs.batch.has_features, logits=len(inputs.columns) > 0)
        if self._compiled is None or not self._compiled.is_open(kind) or inputs.positions.numel() > COMPILED:
            return self._eager(inputs, taps)
        return self._compiled.run(inputs, kind)

    @torch.inference_mode()
    def _difference(self, kind: ForwardKind, compiled: PackagedForward) -> float:
        """How far a library is from the head on a short text, over the range of what the head outputs."""
        size = self.module.feature_size
        features = torch.linspace(-1, 1, 3 * size, device=self.device, dtype=self.dtype).view(3, size)
        slot, tokens = self.open(), torch.tensor([3, 5, 3]) % self.vocab_size
        segment = Segment(
            slot=slot,
            tokens=tokens,
            features=features if kind.features else None,
            logits="all" if kind.logits else "none",
        )
        inputs = self._prepared(self._batch([segment]), self._slots.grown([segment])).inputs
        batch_features = features[None] if kind.features else None
        plain = self.module(_read(inputs, tokens[None], batch_features))
        outputs = compiled.run(inputs, kind)
        self.release(slot)
        pairs = [(plain, outputs.features)]
        if kind.logits:
            pairs.append((self.module.logits(plain), outputs.logits))
        return max(float((a - b).abs().max() / (a.max() - a.min()).clamp_min(1e-9)) for a, b in pairs)

    @torch.inference_mode()
    def _probe(self, probe: Probe) -> None:
        """Let the probe record what each layer caches, by a forward of two tokens."""
        positions = torch.arange(2, device=self.device)[None]
        features = torch.zeros(1, 2, self.module.feature_size, dtype=self.dtype, device=self.device)
        inputs = HeadInputs(
            tokens=torch.zeros_like(positions),
            features=features if features.shape[-1] else None,
            positions=positions,
            mask=cast(Tensor, self._builder.masks(None, positions, 2)),
            cache=probe,
        )
        self.module(inputs)


def _read(
    inputs: Inputs, tokens: Int[Tensor, "rows width"], features: Float[Tensor, "rows width dim"] | None
) -> HeadInputs:
    """What a head reads of the inputs of a forward, and of the tokens and features of its batch."""
    masks = cast(Tensor, inputs.masks)
    return HeadInputs(tokens=tokens, features=features, positions=inputs.positions, mask=masks, cache=inputs.window)


def suited(target: Forward, module: nn.Module) -> Forward:
    """How a head's forwards run beside a target whose forwards run in some way, if nothing is compiled.

    A head is packed where the target is packed or compiled, if it can be. It is replayed
    where the target is, if it lies on such a device.
    """
    if target == "replayed" and next(module.parameters()).device.type in RECORDERS:
        return "replayed"
    return "packed" if target != "eager" and _packable(module) else "eager"


def head_lm(target: Forward, asked: Forward | None, module: nn.Module, *, max_slots: int, max_context: int) -> HeadLM:
    """A head whose forwards run as its target's do, where it can.

    Where the target is compiled on a CPU, so is the head, if its libraries are there or compiled forwards were asked
    for.

    Args:
        target: How the target's forwards run.
        asked: How forwards were asked to run; None: nobody said it.
    """
    lm = HeadLM(module, max_slots=max_slots, max_context=max_context, forward=suited(target, module))
    if target == "compiled" and lm.device.type == "cpu":
        try:
            if asked == "compiled" or all(package.exists() for package in lm.packages):
                lm.prepare()
        except InputError as error:
            log.warning("%s runs %s: %s", type(module).__name__, lm.forward, error)
    return lm


def _packable(module: nn.Module) -> bool:
    """Whether a head can be packed, and there is room for it."""
    weight = next(module.parameters())
    return packs(weight.device, weight.dtype) and fits_packed(module, weight.device)


def sees_all(count: int, before: int = 0) -> Bool[np.ndarray, "count pending"]:
    """The `sees` of a block whose nodes all see each other, and no earlier pending node.

    Example:
        >>> sees_all(2, before=1)
        array([[False,  True,  True],
               [False,  True,  True]])
    """
    return np.concatenate([np.zeros((count, before), dtype=bool), np.ones((count, count), dtype=bool)], 1)
