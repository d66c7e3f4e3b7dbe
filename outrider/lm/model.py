"""A Hugging Face causal language model as the engine sees it: slots, trees of tokens, one forward for all."""

import copy
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from outrider.lm import alibi, flex
from outrider.lm.anatomy import Anatomy, Span
from outrider.lm.attention import look, mask_builder
from outrider.lm.batch import upload
from outrider.lm.cache import Probe, SlotCache, fitting_context, free_bytes
from outrider.lm.compiled import COMPILED, CompiledForwards
from outrider.lm.ends import Ends, find_ends
from outrider.lm.packed import packable, packed
from outrider.lm.protocol import Segment
from outrider.lm.slots import BRANCHES, Pending, Slots
from outrider.lm.slotted import Inputs, Outputs, SlottedLM
from outrider.lm.support import refusal
from outrider.lm.taps import tapped
from outrider.types import InputError

_TOLERANCE = 1e-2


class LanguageModel(SlottedLM):
    """An unmodified transformers causal LM behind the `LM` protocol.

    The cache begins small and grows; at construction its worst case is compared with free memory. The model is put
    into evaluation mode and otherwise left alone: it may be trained, or called by others, between calls.

    Attributes:
        model: The model.
        anatomy: What is known of it.
        num_layers: Decoder layers.

    Args:
        model: The model, on one device.
        max_slots: Most slots at once.
        max_context: Most tokens of one slot. None takes as many as the model's `max_position_embeddings`, its rotary
            scheme and free memory allow.
        vocab_size: Cut the logits to this width, where the model's vocabulary is padded.
        pad_to: Rows are padded to at least this many columns, and the output layer computed for as many. On CPUs
            bfloat16 products of 2 to 32 rows round alike and those of one row do not, so 2 makes decoding
            bit-identical to verifying.
        compile: Compile forwards of up to `COMPILED` columns with torch.compile: on a CPU with frozen weights, one
            graph for all lengths; on a GPU as CUDA graphs. The first forward of each kind takes long, half a minute
            for a dozen layers. Roundings differ from those without; longer forwards, of prompts, are not compiled. The
            weights must not change afterwards.
        prepack: Run a twin of the model whose linear layers are laid out for the CPU's kernels; see `packed`. The
            weights must not change afterwards.

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
        compile: bool = False,
        prepack: bool = False,
    ) -> None:
        for name, value in (("max_slots", max_slots), ("max_context", max_context), ("pad_to", pad_to)):
            if value is not None and value < 1:
                raise InputError(f"{name} must be >= 1, got {value}")
        self.anatomy = Anatomy.of(model)
        if (reason := refusal(self.anatomy, max_context=max_context)) is not None:
            raise InputError(reason)
        if self.anatomy.recurrent or self.anatomy.spans is None:
            raise InputError(f"{self.anatomy.name} has recurrent layers; open it with RecurrentModel")
        check_context(self.anatomy, max_context)
        _check_levers(model, self.anatomy, compile, prepack)
        self.model = model.eval()
        self.device, self.dtype = model.device, model.dtype
        self.num_layers, self.hidden_size = self.anatomy.num_layers, self.anatomy.hidden_size
        self.num_taps, self.num_forwards = self.num_layers + 1, 0
        self._ends: Ends | None = None
        # A compiler treats one column as a kind of its own.
        self.pad_to = max(2, pad_to) if compile else pad_to
        self._twin = packed(model) if prepack else None
        self._layers = self.anatomy.layers if self._twin is None else Anatomy.of(self._twin).layers
        self._compiled = CompiledForwards(model) if compile else None
        self._doubling = compile and model.device.type == "cuda"
        self._builder = mask_builder(model, self.anatomy, self.anatomy.spans or Span())
        probe = Probe()
        self.vocab_size = checked_width(self._probe(probe), vocab_size)
        check_devices(probe.devices, self.device)
        limit = self.anatomy.longest_context
        fitting = fitting_context(
            probe.layers, max_slots=max_slots, max_context=max_context, limit=limit, free=free_bytes(self.device)
        )
        cache = SlotCache(
            probe.layers,
            max_slots=max_slots,
            max_context=fitting + BRANCHES,
            device=self.device,
            num_rows=2 if compile else 1,
        )
        self._slots = Slots(cache, max_slots=max_slots, max_context=fitting)
        if (reason := self._misread()) is not None:
            raise InputError(reason)

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """The model."""
        return {"model": self.model}

    @property
    def levers(self) -> tuple[str, ...]:
        """The options that make its forwards faster and may change their roundings."""
        used = {"compile": self._compiled, "prepack": self._twin}
        return tuple(name for name, made in used.items() if made is not None)

    @property
    def num_compiled_forwards(self) -> int:
        """Number of compiled forwards so far."""
        return 0 if self._compiled is None else self._compiled.num_forwards

    def ends(self) -> Ends:
        """Its embedding, final norm and output layer. Raises InputError if a drafter cannot use them."""
        if self._ends is None:
            self._ends = find_ends(self._runner, self.anatomy)
        return self._ends

    def cast(self, dtype: torch.dtype) -> "LanguageModel":
        """A copy in another dtype, uncompiled. Returns itself if it already has that dtype or is quantised."""
        if self.dtype in (dtype, torch.float64) or getattr(self.model, "is_quantized", False):
            return self
        return LanguageModel(
            copy.deepcopy(self.model).to(dtype),
            max_slots=self.max_slots,
            max_context=self.max_context,
            vocab_size=self.vocab_size,
        )

    @property
    def _runner(self) -> PreTrainedModel:
        """The model, or its packed copy."""
        return self.model if self._twin is None else self._twin

    def _forward(self, inputs: Inputs, taps: Sequence[int]) -> Outputs:
        batch, columns = inputs.batch, inputs.columns
        if self._compiled is not None and batch.width <= COMPILED and not batch.digests_only:
            return self._compiled_forward(self._compiled, inputs, taps)
        some = None if len(columns) == batch.width else columns
        with (
            tapped(self._layers, taps) as seen,
            alibi.bias_in_mask(self._runner),
            flex.uncompiled(self._builder.blocks),
        ):
            logits = self._runner(
                input_ids=batch.tokens(self.device),
                attention_mask=inputs.masks,
                position_ids=inputs.positions,
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=0 if some is None else upload([some], self.device)[0],
            ).logits
        return Outputs(logits=logits, columns=columns, taps=seen)

    def _compiled_forward(self, compiled: CompiledForwards, inputs: Inputs, taps: Sequence[int]) -> Outputs:
        """A compiled forward computes all logits. Where a view begins would become part of a graph."""
        logits, seen = compiled(
            taps,
            input_ids=inputs.batch.tokens(self.device).clone(),
            attention_mask=inputs.masks,
            position_ids=inputs.positions.clone(),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=0,
        )
        return Outputs(logits=logits, columns=np.arange(inputs.batch.width), taps=seen)

    @torch.inference_mode()
    def _probe(self, probe: Probe) -> int:
        """Let the probe record what each layer caches, by a forward of two tokens. Returns the width of the logits."""
        sight = look([0], [Pending().grown(2, None)], np.array([2]), 2)
        (positions,) = upload([sight.positions], self.device)
        try:
            with alibi.bias_in_mask(self.model), flex.tried(self.anatomy.flex):
                output = self.model(
                    input_ids=torch.zeros_like(positions),
                    attention_mask=self._builder.masks(sight, positions, 2),
                    position_ids=positions,
                    past_key_values=probe,
                    use_cache=True,
                )
        except (AttributeError, TypeError, ValueError, KeyError, IndexError) as error:
            raise InputError(f"{self.anatomy.name} cannot be run with masks and a cache of our own: {error}") from error
        return int(output.logits.shape[-1])

    @torch.inference_mode()
    def _misread(self) -> str | None:
        """Why this model gives wrong logits on trees, found by trying one; None if they are right.

        The last of two siblings must have the logits of a plain run without the other sibling. Below float32, roundings
        are too coarse for this test, and the model passes.
        """
        if self.dtype not in (torch.float32, torch.float64):
            return None
        low, high = (n % self.vocab_size for n in (3, 5))
        slot = self.open()
        siblings = np.array([-1, 0, 0, 2])
        tree = torch.tensor([low, high, low, high], device=self.device)
        ours = self.extend([Segment(slot=slot, tokens=tree, parents=siblings, logits="last")]).logits[0]
        self.release(slot)
        self.num_forwards = 0
        with flex.tried(self.anatomy.flex):
            plain = self.model(input_ids=tree[None, [0, 2, 3]], use_cache=False).logits[0, -1, : self.vocab_size]
        difference, spread = float((ours - plain).abs().max()), float(plain.max() - plain.min())
        if difference <= _TOLERANCE * spread:
            return None
        return (
            f"{self.anatomy.name} does not read a tree of tokens as it reads a text (logits differ by "
            f"{difference:.2g} in a range of {spread:.2g}), so its masks or positions work in a way unknown here"
        )


def check_context(anatomy: Anatomy, max_context: int | None) -> None:
    """Raise InputError if a context is longer than the model allows."""
    limit = anatomy.longest_context
    if max_context is not None and limit is not None and max_context > limit:
        raise InputError(f"max_context must be <= {limit}, the most that {anatomy.text_name} allows, got {max_context}")


def checked_width(width: int, vocab_size: int | None) -> int:
    """The width that logits are cut to. Raises InputError if the logits are narrower."""
    if vocab_size is not None and not 1 <= vocab_size <= width:
        raise InputError(f"vocab_size must be in 1..{width}, the width of the model's logits, got {vocab_size}")
    return vocab_size or width


def check_devices(found: set[torch.device], device: torch.device) -> None:
    """Raise InputError if a model is spread over several devices."""
    if found != {device}:
        raise InputError(f"the model must be on one device, got {', '.join(sorted(str(d) for d in found))}")


def _check_levers(model: PreTrainedModel, anatomy: Anatomy, compile: bool, prepack: bool) -> None:
    """Raise InputError if `compile` or `prepack` cannot be used with this model."""
    if compile and anatomy.flex:
        raise InputError(
            "flex_attention runs uncompiled here, so compile would do nothing; load the model with "
            "attn_implementation='sdpa', or leave compile out"
        )
    if compile and prepack:
        raise InputError("compile lays out weights for the CPU's kernels by itself; leave prepack out")
    if prepack and not packable(model):
        raise InputError("prepack works for bfloat16 models on CPUs with kernels for it, and this is none")
