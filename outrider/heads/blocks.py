"""Heads that guess blocks, in files: DFlash, DFlare and DSpark, read from every layout and written in one."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.core.types import InputError
from outrider.heads.block_formats import Answers, block_config, record
from outrider.heads.checkpoint import TARGET, TargetShape, made, read_config, read_tensors, write_head
from outrider.heads.dflare import DFlare
from outrider.heads.dflash import BlockConfig, Confidence, DFlash
from outrider.heads.dspark import DSpark
from outrider.lm.hf.anatomy import Anatomy
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead
from outrider.lm.hf.open import logit_width

HEADS: Mapping[str, type[DFlash]] = {kind.method: kind for kind in (DFlash, DFlare, DSpark)}
"""The heads by name."""
UNUSED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
"""Tensors that a checkpoint may have and a head does not need."""
CONFIDENCE = "confidence_head.proj."
"""What the names of DSpark's confidence head begin with."""


def read_block(
    path: str,
    ends: Callable[[], EmbeddingAndHead],
    vocab_size: int,
    *,
    revision: str | None = None,
    answers: Answers | None = None,
) -> DFlash:
    """The head in a directory or at a hub id.

    Args:
        ends: The target's ends.
        vocab_size: Width of the target's logits.
        answers: What the user says where the files leave it open.

    Raises:
        InputError: There is none, it is damaged, or its files leave open what only the user can say.
    """
    config = block_config(read_config(path, revision=revision), path, answers or Answers())
    tensors = _renamed(read_tensors(path, revision=revision), config)
    output, embedding = tensors.get("lm_head.weight"), tensors.get("embed_tokens.weight")
    if output is None or (len(output) >= vocab_size and not tensors.get("d2t", torch.zeros(1)).any()):
        # All tokens, at their own places.
        tensors.pop("d2t", None)
    config = replace(
        config,
        num_outputs=None if output is None else len(output),
        num_embeddings=None if embedding is None else len(embedding),
        listed="d2t" in tensors,
        confidence=_confidence(config, tensors),
    )
    _check(config, tensors, path, vocab_size)
    known = ends()
    return made(lambda: HEADS[config.method](config, known, vocab_size), tensors, path).eval()


def write_block(head: DFlash, folder: Path, target: PreTrainedModel, dtype: torch.dtype | None = None) -> None:
    """Write a head in the `speculators` layout.

    Args:
        target: The target that it was trained for.
        dtype: Of the written weights; None keeps theirs.
    """
    described = record(head.config, str(target.name_or_path), type(target).__name__)
    anatomy, tensors = Anatomy.of(target), head.state_dict()
    shape = TargetShape(
        num_layers=anatomy.num_layers,
        hidden_size=anatomy.hidden_size,
        vocab_size=logit_width(target),
        taps=head.config.taps,
    )
    described[TARGET] = shape.record()
    kinds = {tensor.dtype if dtype is None else dtype for tensor in tensors.values() if tensor.is_floating_point()}
    described["torch_dtype"] = str(min(kinds, key=str)).removeprefix("torch.")
    write_head(folder, described, tensors, dtype)


def guessed_ids(head: DFlash) -> Tensor | None:
    """The target's ids of the tokens that a head can guess, ascending; None: all."""
    if not head.config.listed:
        return None
    offsets = head.get_buffer("d2t")
    return torch.arange(len(offsets), device=offsets.device) + offsets


def _renamed(tensors: Mapping[str, Tensor], config: BlockConfig) -> dict[str, Tensor]:
    """The tensors under the names of the `speculators` layout, without those that are not used."""
    found = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    for ours, theirs in (("fc", "encoder.fc"), ("hidden_norm", "encoder.output_norm_enc")):
        if f"{theirs}.weight" in found:
            found[f"{ours}.weight"] = found.pop(f"{theirs}.weight")
    if config.method == "dflare" and "layer_fusion_weights" in found:
        # The authors' layout has one norm for all layers.
        norm, count = found.pop("hidden_norm.weight", None), config.layers.num_hidden_layers
        found["fusion_weights"] = found.pop("layer_fusion_weights")
        if norm is not None:
            found |= {f"fusion_norms.{i}.weight": norm.clone() for i in range(count)}
    weight, bias = f"{CONFIDENCE}weight", f"{CONFIDENCE}bias"
    if config.method != "dspark":
        found = {name: tensor for name, tensor in found.items() if not name.startswith(CONFIDENCE)}
    elif weight in found and bias not in found:
        found[bias] = found[weight].new_zeros(1)
    return {name: tensor for name, tensor in found.items() if name not in UNUSED and not name.endswith("inv_freq")}


def _confidence(config: BlockConfig, tensors: Mapping[str, Tensor]) -> Confidence | None:
    """What the confidence head reads, by the width of its weight."""
    weight = tensors.get(f"{CONFIDENCE}weight")
    if weight is None:
        return None
    return "trunk" if weight.shape[-1] == config.layers.hidden_size else "markov"


def _check(config: BlockConfig, tensors: Mapping[str, Tensor], path: str, vocab_size: int) -> None:
    """Raise InputError if the tokens that a head knows are not the target's."""
    # An assistant of transformers has its target's vocabulary.
    known = config.layers.vocab_size or vocab_size
    if known < vocab_size:
        raise InputError(
            f"the head in {path} knows {known:,} tokens, and this target has {vocab_size:,}; give a head that was "
            "trained for this target"
        )
    if not config.listed and config.num_outputs is not None and config.num_outputs < vocab_size:
        raise InputError(
            f"the head in {path} guesses {config.num_outputs:,} of {vocab_size:,} tokens, and has no list (d2t) of them"
        )
    if config.listed:
        offsets = tensors["d2t"].long()
        ids = torch.arange(len(offsets)) + offsets
        rising = bool((ids[1:] > ids[:-1]).all())
        if len(ids) != config.num_outputs or not rising or int(ids[-1]) >= vocab_size or int(ids[0]) < 0:
            raise InputError(f"the list of tokens (d2t) of the head in {path} does not fit this target; get it again")
    if not 0 <= config.mask_id < (config.num_embeddings or known):
        raise InputError(
            f"the head in {path} has the mask token {config.mask_id}, and its tokens are below {known}; say the right "
            "one with mask_token_id=..."
        )
