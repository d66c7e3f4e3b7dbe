"""A Hugging Face causal language model as the engine sees it: slots, trees of tokens, one forward for all."""

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from packaging.version import Version
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.core.option import Bounds
from outrider.core.ranks import join
from outrider.core.types import InputError
from outrider.host.mapped import release_pages
from outrider.lm.checked import Checked
from outrider.lm.fingerprint import shape_of
from outrider.lm.forwards.compilable import CompilableModel, returning
from outrider.lm.forwards.eager import EagerForward
from outrider.lm.forwards.forward import Forward, ForwardChoice
from outrider.lm.forwards.grouped import reads_chains
from outrider.lm.forwards.package import Package, PackagedForward
from outrider.lm.forwards.packed import packable, packed
from outrider.lm.forwards.recorder import RECORDERS
from outrider.lm.forwards.replayed import ReplayedForward, Runs
from outrider.lm.hf import alibi, flex
from outrider.lm.hf.anatomy import Anatomy, Span
from outrider.lm.hf.cache_keyword import cache_keyword
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead, find_embedding_and_head, output_layer
from outrider.lm.hf.mtp import load_mtp
from outrider.lm.hf.spread import check_devices, is_spread
from outrider.lm.hf.support import refusal
from outrider.lm.hf.weights import check_logits, plain, weight_bytes, whole
from outrider.lm.protocol import Segment
from outrider.lm.slots.batch import ForwardBatch, upload
from outrider.lm.slots.budget import activation_bytes
from outrider.lm.slots.cache import Probe
from outrider.lm.slots.inputs import Inputs, Outputs
from outrider.lm.slots.masks import look, mask_builder
from outrider.lm.slots.slots import BRANCHES, Pending, Slots
from outrider.lm.slots.slotted import SlottedLM
from outrider.lm.slots.split import ForwardPrice
from outrider.lm.weights.plain import copied

_TOLERANCE, _ROUGHLY, _NEAR = 1e-2, 0.1, 0.025
_TRIED = ((3, 5), (651, 6280), (2000, 3000), (97, 4001))
LEAST_MASKLESS = 33
"""Fewest columns of a forward without masks on a CPU. Drafts are narrower and round as single tokens do."""
FULL = 7 / 8
"""Largest share of nodes in a padded batch whose padding is left out. To lay nodes out takes about as long as a few of
them."""
COPYING: tuple[Forward, ...] = ("packed", "compiled")
"""Kinds of forward that have copies of the weights."""
FEW, RARE = 4, 256
"""Forwards by copies after which the pages of the model's own weights are given back: behind one that read these
weights, and otherwise."""
COMPILES = Version("2.13")
"""The first version of torch that compiles forwards ahead of time, with every kind of weights, without an error."""
LEAST_CONTEXT = 3
"""Tokens of the longest path on which a model's masks are tried."""


class LanguageModel(SlottedLM):
    """An unmodified transformers causal LM behind the `LM` protocol.

    The cache begins small and grows; at construction its worst case is compared with free memory. The model is put
    into evaluation mode and otherwise left alone: it may be trained, or called by others, between calls.

    Attributes:
        model: The model.
        anatomy: What is known of it.
        num_layers: Decoder layers.
        forward: How its forwards run.
        choice: How that was chosen; None if it was not.
        narrow: Most tokens of a compiled forward; larger ones run eager. None: any number.

    Args:
        model: The model, on one device, or on several where `device_map` put its layers there.
        max_slots: Most slots at once.
        max_context: Most tokens of one slot. None takes as many as the model's `max_position_embeddings`, its rotary
            scheme and free memory allow.
        vocab_size: Cut the logits to this width, where the model's vocabulary is padded.
        pad_to: Rows are padded to at least this many columns, and the output layer computed for as many. On CPUs
            bfloat16 products of 2 to 32 rows round alike and those of one row do not, so 2 makes decoding
            bit-identical to verifying.
        forward: How forwards run: `eager` as transformers runs them; `packed` with linear layers laid out for the CPU's
            kernels, see `packed`; `compiled` from a library on disk on a CPU, see `package`; `replayed` as CUDA graphs
            on a GPU, see `replayed`. With `packed` and `compiled` the weights must not change afterwards. All round
            alike for a single token and a block, or none does. Replayed forwards round as eager ones of the same size;
            the others differ from each other in roundings.
        overcommit: Whether a `max_context` may be asked for that does not fit for all slots at once. Whoever opens
            slots then asks `holds` first.

    Raises:
        InputError: The model cannot be supported, or the cache does not fit in memory.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        ...                      num_attention_heads=2, max_position_embeddings=64)
        >>> lm = LanguageModel(LlamaForCausalLM(config), max_slots=2)
        >>> slot = lm.open()
        >>> _ = lm.extend([Segment(slot=slot, tokens=torch.tensor([3, 1, 4]), logits="none")])
        >>> lm.commit({slot: [0, 1, 2]})
        >>> siblings = Segment(slot=slot, tokens=torch.tensor([1, 5]), parents=np.array([-1, -1]))
        >>> lm.extend([siblings]).logits.shape
        torch.Size([2, 32])
        >>> lm.commit({slot: [1]})
        >>> lm.length(slot)
        4
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_slots: int = 8,
        max_context: int | None = None,
        vocab_size: int | None = None,
        pad_to: int = 1,
        forward: Forward = "eager",
        overcommit: bool = False,
    ) -> None:
        for name, value in (("max_slots", max_slots), ("pad_to", pad_to)):
            if value is not None and value < 1:
                raise InputError(f"{name} must be >= 1, got {value}")
        if pad_to > BRANCHES:
            raise InputError(f"pad_to must be <= {BRANCHES}, got {pad_to}; every forward would have that many columns")
        self.anatomy = Anatomy.of(model)
        if (reason := refusal(self.anatomy, max_context=max_context)) is not None:
            raise InputError(reason)
        if self.anatomy.recurrent or self.anatomy.spans is None:
            raise InputError(f"{self.anatomy.name} has recurrent layers; open it with RecurrentModel")
        check_context(self.anatomy, max_context)
        if self.anatomy.num_processes > 1:
            join(self.anatomy.num_processes)
        self.model = model.eval()
        self.device, self.dtype = model.device, model.dtype
        self.num_layers, self.hidden_size = self.anatomy.num_layers, self.anatomy.hidden_size
        self.num_taps, self.num_forwards = self.num_layers + 1, 0
        self._ends: EmbeddingAndHead | None = None
        self.pad_to = pad_to
        self._builder = mask_builder(model, self.anatomy, self.anatomy.spans or Span())
        self._checked = Checked(model, {"vocab_size": vocab_size, "pad_to": pad_to, "max_slots": max_slots})
        width, recorded = self._checked.find("probe", self._probe)
        probe, self.vocab_size = Probe.of_values(recorded), checked_width(width, vocab_size)
        check_devices(model, probe.devices)
        self._slots = Slots.fitting(
            probe.layers,
            max_slots=max_slots,
            max_context=max_context,
            limit=self.anatomy.longest_context,
            device=self.device,
            num_rows=2 if forward == "compiled" else 1,
            activations=activation_bytes(
                self.device,
                hidden_size=self.hidden_size,
                vocab_size=self.vocab_size,
                dtype=self.dtype,
                max_slots=max_slots,
            ),
            overcommit=overcommit,
        )
        self._price = ForwardPrice(
            weights=weight_bytes(model),
            num_layers=self.num_layers,
            position=self.cache.position_bytes,
            device=self.device,
        )
        self._forwards: dict[Forward, Runs] = {}
        self._until_release = RARE
        self.choice: ForwardChoice | None = None
        self.narrow = self.widest
        self.run_by("eager")
        self._maskless_from = self._checked.find("maskless from", self._least_maskless)
        if forward != "eager":
            self.run_by(forward)

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """The model."""
        return {"model": self.model}

    def run_by(self, forward: Forward) -> None:
        """Choose how forwards run from now on.

        Raises:
            InputError: This model cannot run so here.
        """
        if (reason := self.why_not(forward)) is not None:
            raise InputError(reason)
        new = forward not in self._forwards
        if new:
            self._forwards[forward] = self._new_forward(forward)
        self.forward, runs = forward, self._forwards[forward]
        self._replaying = runs if isinstance(runs, ReplayedForward) else None
        if new and (reason := self._checked.flaw(self._name_of_check(), self._misread)) is not None:
            del self._forwards[forward]
            raise InputError(reason)

    def _name_of_check(self) -> str:
        """What names the check of its forwards as they run now."""
        runs = self._forwards[self.forward]
        return f"compiled {runs.folder.name}" if isinstance(runs, PackagedForward) else self.forward

    def drop_others(self) -> None:
        """Drop what forwards of other kinds hold: copies of weights. Eager forwards hold none, and stay.

        Weights that are mapped from files, and that its own forwards have copies of, take no more memory from now on
        until they are read again.
        """
        self._forwards = {name: runs for name, runs in self._forwards.items() if name in ("eager", self.forward)}
        if self.forward in COPYING:
            release_pages(self.model.parameters())

    def why_not(self, forward: Forward) -> str | None:
        """Why its forwards cannot run so here, in one sentence; None if they can."""
        return why_not(self.model, self.anatomy, forward)

    def prepare(self, taps: Sequence[int] = ()) -> None:
        """Make the library of forwards with these taps, if it is not there, and run by it from now on.

        Raises:
            InputError: It cannot be made.
        """
        self.run_by("compiled")
        runs = self._forwards["compiled"]
        if isinstance(runs, PackagedForward):
            runs.prepare(returning(taps))

    def has_library(self, taps: Sequence[int]) -> bool:
        """Whether a library on disk computes forwards with these taps. Where it is false, they run eager."""
        runs = self._forwards.get("compiled")
        return isinstance(runs, PackagedForward) and runs.has(returning(taps))

    def renew(self) -> None:
        """Read the weights again, because they have changed. Packed copies of them are made, and forwards recorded,
        anew.

        Raises:
            RuntimeError: Compiled forwards hold the weights that they were made of.
        """
        if "compiled" in self._forwards:
            raise RuntimeError(f"the compiled forwards of {self.anatomy.name} hold weights that have changed")
        if "packed" in self._forwards:
            self._forwards["packed"] = self._new_forward("packed")
        if isinstance(replayed := self._forwards.get("replayed"), ReplayedForward):
            replayed.forget()

    def _new_forward(self, forward: Forward) -> Runs:
        if forward == "packed":
            return EagerForward(packed(self.model))
        if forward == "eager":
            return EagerForward(self.model)
        if forward == "replayed":
            eager = cast(EagerForward, self._forwards["eager"])
            return ReplayedForward(
                eager,
                name=self.anatomy.name,
                cache=self.cache,
                modules=lambda: [eager.model],
                vocab_size=self.vocab_size,
            )
        packaged = PackagedForward(self.package)
        packaged.prepare(returning())
        return packaged

    @property
    def package(self) -> Package:
        """The library of its forward."""
        return Package(
            of=CompilableModel(model=self.model),
            kind=returning(),
            builder=self._builder,
            storages=self.cache.storages,
            entries=self.cache.entries,
        )

    @property
    def widest(self) -> int | None:
        """Most tokens that its compiled forwards can take at once; None: any number."""
        return CompilableModel(model=self.model).widest if self.device.type == "cpu" else None

    @property
    def num_compiled_forwards(self) -> int:
        """Number of forwards so far that were computed by a library or replayed."""
        return sum(getattr(self._forwards.get(name), "num_forwards", 0) for name in ("compiled", "replayed"))

    def hold_weakly(self) -> None:
        """Do not keep the model alive. Forwards that were packed or compiled keep what they were made of."""
        self.model = weakref.proxy(self.model)
        if isinstance(eager := self._forwards["eager"], EagerForward):
            eager.model = self.model

    def embedding_and_head(self) -> EmbeddingAndHead:
        """Its embedding, final norm and output layer. The weights of the output layer are packed where its own forwards
        are packed or compiled.

        Raises:
            InputError: A drafter cannot use them.
        """
        if self._ends is None:
            self._ends = replace(find_embedding_and_head(self.model, self.anatomy), target=shape_of(self.model))
            if self.forward != "eager" and packable(self.model):
                self._ends = replace(self._ends, head=self._packed_output(), unpacked=self._ends.head, pack=packed)
        return self._ends

    def _packed_output(self) -> Callable[[Tensor], Tensor]:
        packs = self._forwards.get("packed")
        if isinstance(packs, EagerForward):
            return output_layer(packs.model)
        return output_layer(self.model).copied(packed)

    def mtp(self, path: str | None) -> Any:
        """Its multi-token-prediction layers, loaded from a checkpoint, by default its own; see `load_mtp`."""
        return load_mtp(self.model, path)

    def cast(self, dtype: torch.dtype) -> "LanguageModel":
        """A copy in another dtype, uncompiled, with as long a context as the model and the memory allow. Returns itself
        if it already has that dtype or transformers quantised it. Layers that compute from blocks get plain weights.
        """
        if self.dtype in (dtype, torch.float64) or getattr(self.model, "is_quantized", False):
            return self
        return LanguageModel(copied(self.model, dtype), max_slots=self.max_slots, vocab_size=self.vocab_size)

    def _forward(self, inputs: Inputs, taps: Sequence[int]) -> Outputs:
        chosen = runs = self._runs(inputs.positions.numel())
        if isinstance(chosen, PackagedForward) and not chosen.has(returning(taps)):
            runs = self._forwards["eager"]
        outputs = runs(inputs, taps)
        if self.forward in COPYING:
            self._release_own(by_copies=runs is chosen and chosen is self._forwards[self.forward])
        return outputs

    def _release_own(self, *, by_copies: bool) -> None:
        """Give back the pages of the model's own weights a few forwards behind one that read them all: others of that
        kind may follow at once. Later now and then, because each forward reads some rows of the embedding.
        """
        self._until_release = self._until_release - 1 if by_copies else FEW
        if self._until_release == 0:
            release_pages(self.model.parameters())
            self._until_release = RARE

    def _runs(self, size: int) -> Runs:
        """What runs forwards of so many tokens, padding included."""
        wide = self.forward == "compiled" and self.narrow is not None and size > self.narrow
        return self._forwards["eager" if wide else self.forward]

    def _runs_unpadded(self, batch: ForwardBatch, taps: Sequence[int]) -> bool:
        count = self._width(int(batch.counts.sum()))
        if count > FULL * len(batch.segments) * batch.width:
            return False
        runs = self._runs(count)
        return isinstance(runs, PackagedForward) and runs.unpadded and runs.has(returning(taps))

    def _runs_without_mask(self, batch: ForwardBatch) -> bool:
        runs = self._runs(len(batch.segments) * batch.width)
        # On GPUs prompts run eager, whatever runs the rest.
        return isinstance(runs, EagerForward) or (self.device.type != "cpu" and batch.prefill_only)

    def _least_maskless(self) -> int | None:
        """Fewest columns of a forward over chains that has no mask; None where all have one, because `sdpa` does not
        compute this model's attention or the model does not read a text rightly so. That is found by trying.
        """
        shapes = [storage.shape for storage in self.cache.storages]
        sizes = list(zip((s[-1] for s in shapes[::2]), (s[-1] for s in shapes[1::2]), strict=True))
        plain = self.anatomy.attention == "sdpa" and self._builder.slopes is None
        if not plain or not reads_chains(self.device, self.dtype, sizes):
            return None
        self._maskless_from = 1
        try:
            reads = self._reads_chains()
        except (AttributeError, TypeError, ValueError, KeyError, IndexError, RuntimeError):
            reads = False
        return (LEAST_MASKLESS if self.device.type == "cpu" else 1) if reads else None

    @torch.inference_mode()
    def _reads_chains(self) -> bool:
        """Whether the last of three tokens has the logits of a plain run, where the first one is read before."""
        text = torch.arange(3, 6, device=self.device) % self.vocab_size
        slot = self.open()
        try:
            self.extend([Segment(slot=slot, tokens=text[:1], logits="none")])
            ours = self.extend([Segment(slot=slot, tokens=text[1:], logits="last")]).logits[0]
        finally:
            self.release(slot, clean=True)
            self.num_forwards = 0
        plain = self.model(input_ids=text[None], use_cache=False).logits[0, -1, : self.vocab_size]
        exact = self.dtype in (torch.float32, torch.float64)
        return float((ours - plain).abs().max()) <= (_TOLERANCE if exact else _ROUGHLY) * float(
            plain.max() - plain.min()
        )

    @torch.inference_mode()
    def _probe(self) -> tuple[int, list[list[Any]]]:
        """The width of the logits, and what each layer caches: recorded by a forward of two tokens."""
        probe = Probe()
        sight = look([0], [Pending().grown(2, None)], np.array([2]), 2)
        (positions,) = upload([sight.positions], self.device)
        try:
            with alibi.bias_in_mask(self.model), flex.tried(self.anatomy.flex):
                output = self.model(
                    input_ids=torch.zeros_like(positions),
                    attention_mask=self._builder.masks(sight, positions, 2),
                    position_ids=positions,
                    use_cache=True,
                    **{cache_keyword(type(self.model)): probe},
                )
        except (AttributeError, TypeError, ValueError, KeyError, IndexError) as error:
            raise InputError(f"{self.anatomy.name} cannot be run with masks and a cache of our own: {error}") from error
        except RuntimeError as error:
            if self.anatomy.num_processes == 1:
                raise
            asking, asked = (
                getattr(self.anatomy.text, f"num_{kind}_heads", "?") for kind in ("attention", "key_value")
            )
            raise InputError(
                f"{self.anatomy.num_processes} processes cannot divide {self.anatomy.name} among them: it has {asking} "
                f"query heads and {asked} key heads, and each process needs equally many; choose another number of "
                "processes"
            ) from error
        check_logits(output.logits, self.model, self.anatomy.name)
        return int(output.logits.shape[-1]), probe.values()

    @torch.inference_mode()
    def _misread(self) -> str | None:
        """Why this model gives wrong logits on trees, found by trying one; None if they are right.

        The last of two siblings must have the logits of a plain run without the other sibling. Below float32, roundings
        are too coarse to tell one mask from another, and a model passes as it is; a compiled one must be near.
        """
        exact = self.dtype in (torch.float32, torch.float64)
        if self.forward == "packed" or not (exact or self.forward in ("compiled", "replayed")):
            return None
        difference, spread = self._apart(*_TRIED[0])
        if difference <= (_TOLERANCE if exact else _ROUGHLY) * spread:
            return None
        # At some tokens a model rounds so coarsely below float32 that eager forwards are far off too. It is judged, by
        # the same bound, at others, where they are near.
        for pair in () if exact or self._eager_is_near(*_TRIED[0]) else _TRIED[1:]:
            if self._eager_is_near(*pair):
                difference, spread = self._apart(*pair)
                if difference <= _ROUGHLY * spread:
                    return None
                break
        if not math.isfinite(spread + difference):
            return f"{self.anatomy.name} gives logits that are not numbers for a short text; look at its config"
        if self.forward in ("compiled", "replayed"):
            return (
                f"the {self.forward} forward of {self.anatomy.name} does not say what the model says (logits differ by "
                f"{difference:.2g} in a range of {spread:.2g}); choose forward=eager"
            )
        return (
            f"{self.anatomy.name} does not read a tree of tokens as it reads a text (logits differ by "
            f"{difference:.2g} in a range of {spread:.2g}), so its masks or positions work in a way unknown here"
        )

    def _eager_is_near(self, low: int, high: int) -> bool:
        tried = self.forward
        self.run_by("eager")
        difference, spread = self._apart(low, high)
        self.run_by(tried)
        return difference <= _NEAR * spread

    def _apart(self, low: int, high: int) -> tuple[float, float]:
        """How far logits behind the second of two siblings are from a plain run's, and the range of those."""
        low, high = low % self.vocab_size, high % self.vocab_size
        tree = torch.tensor([low, high, low, high], device=self.device)
        segments = [Segment(slot=self.open(), tokens=tree, parents=np.array([-1, 0, 0, 2]), logits="last")]
        if self.forward == "compiled" and self.max_slots > 1:
            # A shorter row, so that what runs without padding is tried too.
            segments.append(Segment(slot=self.open(), tokens=tree[:1], logits="last"))
        ours = self.extend(segments).logits[0]
        for segment in segments:
            self.release(segment.slot)
        self.num_forwards = 0
        with flex.tried(self.anatomy.flex):
            plain = self.model(input_ids=tree[None, [0, 2, 3]], use_cache=False).logits[0, -1, : self.vocab_size]
        check_logits(plain, self.model, self.anatomy.name)
        return float((ours - plain).abs().max()), float(plain.max() - plain.min())


def check_context(anatomy: Anatomy, max_context: int | None) -> None:
    """Raise InputError if a context is longer than the model allows, or too short for the check of its masks."""
    limit = anatomy.longest_context
    Bounds(least=LEAST_CONTEXT).check("max_context", max_context)
    if max_context is not None and limit is not None and max_context > limit:
        raise InputError(f"max_context must be <= {limit}, the most that {anatomy.text_name} allows, got {max_context}")


def checked_width(width: int, vocab_size: int | None) -> int:
    """The width that logits are cut to. Raises InputError if the logits are narrower."""
    if vocab_size is not None and not 1 <= vocab_size <= width:
        raise InputError(f"vocab_size must be in 1..{width}, the width of the model's logits, got {vocab_size}")
    return vocab_size or width


def runnable(model: PreTrainedModel, forward: Forward | None) -> Forward | None:
    """The kind of forward that was asked for if the model can run so, otherwise `eager`; None stays None."""
    anatomy = Anatomy.of(model)
    if forward is None or (not anatomy.recurrent and why_not(model, anatomy, forward) is None):
        return forward
    return "eager"


def why_not(model: PreTrainedModel, anatomy: Anatomy, forward: Forward) -> str | None:
    """Why this model's forwards cannot run so here, in one sentence; None if they can."""
    if forward != "eager" and anatomy.num_processes > 1:
        return f"forward={forward} is for models in one process, and {anatomy.name} is in several; choose forward=eager"
    if forward != "eager" and is_spread(anatomy.layers):
        return f"forward={forward} is for models on one device, and {anatomy.name} is on several; choose forward=eager"
    if forward == "replayed" and model.device.type not in RECORDERS:
        return f"forward=replayed is for GPUs, and {anatomy.name} is on {model.device}; leave out forward"
    if forward == "compiled" and model.device.type != "cpu":
        return f"forward=compiled is for CPUs, and {anatomy.name} is on {model.device}; choose forward=replayed"
    if forward in ("compiled", "replayed") and anatomy.flex:
        return (
            "flex_attention runs uncompiled here; load the model with attn_implementation='sdpa', or choose "
            "forward=eager"
        )
    if forward == "compiled" and model.config.model_type in alibi.MODELS:
        return f"{anatomy.name} moves its bias into the mask by hand, which cannot be compiled; choose forward=eager"
    if forward in ("compiled", "replayed") and not whole(model):
        return (
            f"some weights of {anatomy.name} are quantised or offloaded, and only plain tensors can be {forward}; "
            "choose forward=eager"
        )
    if forward == "compiled" and Version(torch.__version__) < COMPILES:
        here = torch.__version__
        return f"forward=compiled needs torch {COMPILES} or later, and torch {here} is here; choose another forward"
    if forward == "packed" and packable(model) and not any(plain(module) for module in model.modules()):
        return f"no linear layer of {anatomy.name} has a plain weight, so nothing can be packed; choose forward=eager"
    if forward == "packed" and not packable(model):
        return "forward=packed works for bfloat16 models on CPUs with kernels for it, and this is none"
    return None
