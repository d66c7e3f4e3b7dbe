"""Checkpoints of AWQ and GPTQ as models whose linear layers keep the codes: 4 bits a weight, groups along the inputs.

A weight is its group's scale times (its code minus the group's zero point). Where every zero point is 8, that is Q4_0.
Elsewhere it is Q5_0, whose codes are these differences plus 16, from 0 to 31. Both are exact, and repeat the scale of a
larger group every 32 weights.

Relied on in transformers (read in 5.24): `config.quantization_config` of a checkpoint is the dict in its config.json.

The formats: `awq/utils/packing_utils.py` of https://github.com/casper-hansen/AutoAWQ and
`auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py` of https://github.com/AutoGPTQ/AutoGPTQ
"""

import copy
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int, UInt8
from safetensors import safe_open
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import cached_file

from outrider.core.place import CheckpointPlace
from outrider.core.types import InputError
from outrider.lm.hf.open import LOADING, level_of
from outrider.lm.weights.blocks import GROUP, SLICE, BlockWeight
from outrider.lm.weights.empty import empty_model, place_numbers, tie, weight_of
from outrider.lm.weights.linear import can_hold_blocks, place_blocks
from outrider.lm.weights.plain import copied, why_plain
from outrider.lm.weights.quantised import five_bits, four_bits

METHODS = ("awq", "gptq")
"""What `quant_method` says in the configs of such checkpoints."""
BITS = 4
INDEX, ALONE = "model.safetensors.index.json", "model.safetensors"
"""The files that say where tensors are, and that hold all of them."""
PLACES = {"awq": (0, 4, 1, 5, 2, 6, 3, 7), "gptq": tuple(range(8))}
"""For each of eight neighbouring outputs, the place of its code or zero point in a word of 32 bits."""
PARTS = ("qweight", "qzeros", "scales", "g_idx")
"""The tensors of a quantised linear layer besides its bias."""
log = logging.getLogger(LOADING)


@dataclass(frozen=True, kw_only=True)
class GroupFormat:
    """How a checkpoint's codes lie.

    Attributes:
        method: `awq` or `gptq`.
        group: Weights of a group; None: a row is one group.
        shift: What is to be added to zero points: the first format of GPTQ keeps one less.
    """

    method: str
    group: int | None
    shift: int

    @classmethod
    def of(cls, settings: Mapping[str, Any], name: str) -> "GroupFormat":
        """The format that a config names.

        Args:
            settings: Its `quantization_config`.
            name: What a person calls the checkpoint.

        Raises:
            InputError: No layer computes from such codes.
        """
        method = str(settings["quant_method"])
        kind = str(settings.get("checkpoint_format") or settings.get("format") or settings.get("version") or "").lower()
        if (bits := settings.get("bits", settings.get("w_bit"))) != BITS:
            raise InputError(f"{name} has weights of {bits} bits, and of {method} only {BITS} are known here")
        if kind not in ("", *{"awq": ("gemm",), "gptq": ("gptq", "gptq_v2")}[method]):
            raise InputError(f"{name} is a checkpoint of {method} in the format {kind!r}, which is not known here")
        if method == "awq" and not settings.get("zero_point", True):
            raise InputError(f"{name} is a checkpoint of awq without zero points, which is not known here")
        size = int(settings.get("group_size", settings.get("q_group_size", 128)))
        if size != -1 and (size < GROUP or size % GROUP):
            raise InputError(f"{name} has groups of {size} weights, and only multiples of {GROUP} are known here")
        return cls(method=method, group=None if size == -1 else size, shift=int(method == "gptq" and kind != "gptq_v2"))

    def weight(self, path: str, parts: Mapping[str, Tensor]) -> BlockWeight:
        """The matrix of a linear layer.

        Args:
            path: The layer, for messages.
            parts: The tensors of the layer, by their names in `PARTS`.

        Raises:
            InputError: Its inputs are in an order of their own, scales are not exact in float16, or shapes do not fit.
        """
        if absent := [part for part in PARTS[:3] if part not in parts]:
            raise InputError(f"{path} has no {absent[0]}; get the complete checkpoint")
        words, scales, order = parts["qweight"], parts["scales"], parts.get("g_idx")
        features, outputs = words.shape[0] * (1 if self.method == "awq" else 8), scales.shape[1]
        group = self.group or features
        zeros = _unpacked(parts["qzeros"], PLACES[self.method]) + self.shift
        if features % group or zeros.shape != scales.shape or len(scales) != features // group:
            raise InputError(f"the tensors of {path} do not fit together; get the checkpoint again")
        if order is not None and not torch.equal(order.long(), torch.arange(features) // group):
            raise InputError(
                f"{path} has its inputs in an order of their own (act-order), which is not known here; get a "
                "checkpoint that was made with desc_act=false"
            )
        halves = scales.to(torch.float16)
        if not torch.equal(halves.to(scales.dtype), scales):
            raise InputError(f"{path} has scales that are not exact in float16, and others are not known here")
        return _weight(lambda rows: self._codes(words, rows), zeros.T, halves.float().T, outputs, features)

    def _codes(self, words: Int[Tensor, "inputs words"], rows: slice) -> UInt8[Tensor, "rows in_features"]:
        """The codes of some outputs; their number is a multiple of eight."""
        if self.method == "awq":
            return _unpacked(words[:, rows.start // 8 : rows.stop // 8], PLACES["awq"]).T
        return _unpacked(words[:, rows].T, PLACES["gptq"])


@dataclass(frozen=True, kw_only=True)
class GroupModel:
    """A model that keeps a checkpoint's codes, before its tensors are read.

    Attributes:
        place: Where the checkpoint is.
        format: How its codes lie.
        model: The model; its weights have shapes and no values.
        files: The file of each tensor.
        revision: Branch, tag or commit of a hub id.
    """

    place: CheckpointPlace
    format: GroupFormat
    model: PreTrainedModel
    files: Mapping[str, Path]
    revision: str | None = None

    @classmethod
    def of(
        cls,
        place: CheckpointPlace,
        config: PreTrainedConfig,
        attn_implementation: str | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        revision: str | None = None,
    ) -> "GroupModel":
        """The model of a folder or a hub id.

        Args:
            config: Its config, with a `quantization_config` whose method is in `METHODS`.
            attn_implementation: How attention is computed; None leaves it to transformers.
            dtype: Of activations, and of the weights that are not packed.

        Raises:
            InputError: No layer computes from its codes.
        """
        codes = GroupFormat.of(settings_of(config), place.name)
        config = copy.deepcopy(config)
        for each in (config, config.get_text_config(decoder=True)):
            vars(each).pop("quantization_config", None)
        model = empty_model(config, dtype, attn_implementation)
        return cls(place=place, format=codes, model=model, files=_files(place, revision), revision=revision)

    @property
    def size(self) -> int:
        """About its bytes in memory."""
        return sum(file.stat().st_size for file in set(self.files.values()))

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""
        return self.model.dtype

    @property
    def blocks(self) -> str:
        """What is packed, for a sentence."""
        group = "rows" if self.format.group is None else f"groups of {self.format.group}"
        return f"{self.format.method}, {BITS} bits in {group}"

    def read(self) -> tuple[PreTrainedModel, Mapping[str, Any]]:
        """The model with its weights, and what is to tell of its loading, as transformers tells it."""
        model, opened = self.model, {file: safe_open(file, "pt") for file in set(self.files.values())}

        def tensor(name: str) -> Tensor:
            found: Tensor = opened[self.files[name]].get_tensor(name)
            return found

        layers = [name.removesuffix(".qweight") for name in self.files if name.endswith(".qweight")]
        inside, mismatched = dict(model.named_modules()), list[tuple[str, Any, Any]]()
        for path in layers:
            if type(inside.get(path)) is not nn.Linear:
                raise InputError(f"{path} of {self.place.name} is no linear layer of {type(model).__name__}")
            parts = {part: tensor(name) for part in PARTS if (name := f"{path}.{part}") in self.files}
            weight = self.format.weight(path, parts)
            wanted, shape = tuple(weight_of(model, f"{path}.weight").shape), (weight.out_features, weight.in_features)
            if shape == wanted:
                place_blocks(model, path, weight)
            else:
                mismatched.append((f"{path}.weight", shape, wanted))
        packed = {f"{path}.{part}" for path in layers for part in PARTS}
        names = set(model.state_dict())
        for name in self.files.keys() & names - packed:
            values, wanted = tensor(name), tuple(weight_of(model, name).shape)
            if tuple(values.shape) == wanted:
                # A copy, so that the file need not stay open.
                place_numbers(model, name, values.to(model.dtype, copy=True))
            else:
                mismatched.append((name, tuple(values.shape), wanted))
        tie(model)
        left = {name for name, weight in [*model.named_parameters(), *model.named_buffers()] if weight.is_meta}
        if (file := _beside(self.place, "generation_config.json", self.revision)) is not None:
            model.generation_config = GenerationConfig.from_pretrained(file.parent)
        model.config.name_or_path = model.name_or_path = self.place.name
        _pack_rest(model.eval())
        missing = left - {name for name, _, _ in mismatched}
        if not missing and not mismatched and (reason := why_plain(model)) is not None:
            log.log(level_of(model), "its weights are made plain, because %s", reason)
            model = copied(model, model.dtype).eval()
        return model, {
            "missing_keys": missing,
            "unexpected_keys": self.files.keys() - names - packed,
            "mismatched_keys": set(mismatched),
        }


def settings_of(config: PreTrainedConfig) -> Mapping[str, Any]:
    """How a checkpoint was quantised, as its config says; empty where it was not."""
    settings = getattr(config, "quantization_config", None) or {}
    return settings if isinstance(settings, Mapping) else dict(settings.to_dict())


def _weight(
    codes: Callable[[slice], UInt8[Tensor, "rows in_features"]],
    zeros: UInt8[Tensor, "outputs groups"],
    scales: Float[Tensor, "outputs groups"],
    outputs: int,
    features: int,
) -> BlockWeight:
    """A matrix of codes, some rows at a time."""
    kind, repeats = "Q4_0" if bool((zeros == 8).all()) else "Q5_0", features // GROUP // zeros.shape[1]
    slices = list[Tensor]()
    for first in range(0, outputs, SLICE):
        rows = slice(first, min(first + SLICE, outputs))
        groups = codes(rows).unflatten(1, (-1, GROUP))
        scale = scales[rows].repeat_interleave(repeats, 1)[..., None]
        if kind == "Q4_0":
            slices.append(four_bits(scale, groups).flatten(1))
        else:
            difference = groups + (16 - zeros[rows].repeat_interleave(repeats, 1)[..., None])
            slices.append(five_bits(scale, difference).flatten(1))
    return BlockWeight.of_gguf(torch.cat(slices), kind)


def _pack_rest(model: PreTrainedModel) -> None:
    """Let plain layers in bfloat16 compute by the same kernels from the same numbers, so that a token keeps its bits
    whatever stands beside it.
    """
    blocks = dict[int, BlockWeight]()
    for path, layer in list(model.named_modules(remove_duplicate=False)):
        if not can_hold_blocks(layer) or layer.weight.is_meta or layer.weight.dtype != torch.bfloat16:
            continue
        weight = layer.weight.detach()
        if weight.shape[1] % GROUP == 0:
            if id(layer.weight) not in blocks:
                blocks[id(layer.weight)] = BlockWeight.of_gguf(weight.contiguous().view(torch.uint8), "BF16")
            place_blocks(model, path, blocks[id(layer.weight)])


def _unpacked(words: Int[Tensor, "rows words"], places: tuple[int, ...]) -> UInt8[Tensor, "rows codes"]:
    """Eight codes of each word, those at some places one behind another."""
    shifts = BITS * torch.tensor(places, dtype=words.dtype)
    return (words[..., None] >> shifts & 15).to(torch.uint8).flatten(1)


def _files(place: CheckpointPlace, revision: str | None) -> dict[str, Path]:
    """The file of each tensor. Those of a hub id are fetched."""
    names, index = {ALONE}, _beside(place, INDEX, revision)
    if index is not None:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    files = dict[str, Path]()
    for name in sorted(names):
        file = _beside(place, name, revision)
        if file is None:
            raise InputError(f"{place.name} has no file {name}; get the complete checkpoint, as safetensors")
        with safe_open(file, "pt") as opened:
            files |= dict.fromkeys(opened.keys(), file)
    return files


def _beside(place: CheckpointPlace, name: str, revision: str | None) -> Path | None:
    """A file of a checkpoint; None if it has none of that name."""
    found = cached_file(place.folder, name, revision=revision, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)
