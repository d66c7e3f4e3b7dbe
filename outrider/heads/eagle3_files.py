"""The files of EAGLE-3 heads: the layout of `speculators`, which is written, and that of the method's authors."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from outrider.core.types import InputError
from outrider.heads.checkpoint import KIND, TARGET, TargetShape, made, nested, size, whole_numbers, write_head
from outrider.heads.eagle3 import Eagle3Config, Eagle3Head, default_taps
from outrider.heads.parts.layer_config import LEFT_OUT, described, layer_config, qkv_bias_of
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead

SPECULATORS = "eagle3"
"""The `speculators_model_type` of the first layout."""
NATIVE = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
"""Architectures of the second one."""
MASK = "mask_hidden"
"""The tensor that a P-EAGLE head has beside those of an EAGLE-3 head."""
ARCHITECTURE, VERSION = "Eagle3Speculator", "0.2.0"
LEGACY = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
TAPS = "eagle_aux_hidden_state_layer_ids"
"""The key that names the tapped states. In the layout of speculators, id k is what enters layer k."""


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What a user says of a checkpoint where its files leave it open; None: nothing.

    Attributes:
        norm_before_residual: Whether the residual of the first layer is the normed feature.
        norm_output: Whether the normed output is the next feature.
        taps: The hidden states that it reads.
    """

    norm_before_residual: bool | None = None
    norm_output: bool | None = None
    taps: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Eagle3File:
    """A checkpoint of EAGLE-3 before it is bound to a target.

    Attributes:
        given: Its config.
        layer: The sizes of its layers.
        tensors: Its tensors, under the names of `Eagle3Head`.
        target: The target that the config names; None if it names none.
    """

    path: str
    given: Mapping[str, Any]
    layer: Any
    tensors: Mapping[str, Tensor]
    target: TargetShape | None

    @classmethod
    def of(cls, path: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> "Eagle3File":
        """A checkpoint by its two files. Raises InputError if it is one of P-EAGLE, or its config makes no sense."""
        if any(name.removeprefix("model.") == MASK for name in tensors):
            raise InputError(f"the head in {path} is a P-EAGLE head (it has {MASK}); use drafter parallel")
        inner = config
        if _is_speculators(config) and "transformer_layer_config" in config:
            inner = nested(config, "transformer_layer_config", path)
        kept = {_name(name): tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
        return cls(
            path=path,
            given=config,
            layer=layer_config(inner, path),
            tensors=kept,
            target=TargetShape.of(config, path),
        )

    @property
    def target_hidden_size(self) -> int:
        """Width of the target's hidden states."""
        return size(self.given, "target_hidden_size", self.path, default=self.layer.hidden_size)

    def head(self, ends: EmbeddingAndHead, *, num_layers: int, vocab_size: int, answers: Answers) -> Eagle3Head:
        """The head.

        Args:
            ends: The target's ends.
            num_layers: The target's decoder layers.
            vocab_size: Width of the target's logits; tokens beyond it are not guessed.
            answers: What the user says where the files leave it open.

        Raises:
            InputError: The tensors are not those of such a head, or a question is open.
        """
        tensors, ids = self._for(vocab_size)
        width = vocab_size if ids is None else len(ids)
        config = Eagle3Config(
            layer=self.layer,
            target_hidden_size=self.target_hidden_size,
            vocab_size=int(self.layer.vocab_size),
            draft_vocab_size=width if "lm_head.weight" not in tensors else len(tensors["lm_head.weight"]),
            taps=self._taps(num_layers, answers),
            norm_before_residual=self._norm_before_residual(answers),
            norm_before_fc=self._flag("norm_before_fc") or "input_norm.weight" in tensors,
            fc_norm=self._flag("fc_norm") or self._flag("use_aux_norm") or "fc_norm.0.weight" in tensors,
            norm_output=self._norm_output(answers),
            own_embedding="embed_tokens.weight" in tensors,
            own_output="lm_head.weight" in tensors,
            qkv_bias=qkv_bias_of(tensors),
        )
        if not config.own_embedding and self.layer.hidden_size != self.target_hidden_size:
            raise InputError(f"the head in {self.path} is narrower than its target and has no embed_tokens.weight")
        head = made(lambda: Eagle3Head(config, ends, ids), tensors, self.path, unused=("d2t", *LEFT_OUT))
        head.vocab_size = min(width, config.draft_vocab_size)
        return head

    def _for(self, vocab_size: int) -> tuple[dict[str, Tensor], Int[Tensor, " width"] | None]:
        """The tensors, and the tokens that the head guesses in ascending order, without those that the target lacks."""
        tensors, offsets = dict(self.tensors), self.tensors.get("d2t")
        output = tensors.get("lm_head.weight")
        if output is None or offsets is None:
            vocabulary = int(self.layer.vocab_size)
            narrow = size(self.given, "draft_vocab_size", self.path, default=vocabulary)
            if narrow < vocabulary:
                raise InputError(
                    f"the head in {self.path} guesses {narrow} tokens, and lm_head.weight or d2t is missing"
                )
            return tensors, None
        if offsets.dim() != 1 or offsets.is_floating_point() or offsets.dtype is torch.bool:
            raise InputError(f"d2t in {self.path} must be a list of whole numbers")
        if len(offsets) != len(output):
            raise InputError(
                f"d2t in {self.path} names {len(offsets)} tokens, and lm_head.weight has {len(output)} rows"
            )
        ids = torch.arange(len(offsets)) + offsets.long()
        if int(ids.min()) < 0 or int(ids.max()) >= int(self.layer.vocab_size) or len(ids.unique()) < len(ids):
            raise InputError(f"d2t in {self.path} names tokens twice, or tokens that its target does not have")
        order = ids.argsort()
        order = order[ids[order] < vocab_size]
        if len(order) < len(ids) or not torch.equal(order, torch.arange(len(ids))):
            tensors["lm_head.weight"] = output[order]
        return tensors, ids[order]

    def _flag(self, name: str) -> bool:
        return bool(self.given.get(name))

    def _norm_before_residual(self, answers: Answers) -> bool:
        said = self.given.get("norm_before_residual")
        if said is None:
            said = answers.norm_before_residual
        if said is None and _is_speculators(self.given):
            raise InputError(
                f"the config of {self.path} has no norm_before_residual, which vLLM takes for true and speculators for "
                "false; add norm_before_residual=true or false behind the path, as the head was trained"
            )
        return bool(said)

    def _norm_output(self, answers: Answers) -> bool:
        if answers.norm_output is not None:
            return answers.norm_output
        if self._flag("norm_output") and not _is_speculators(self.given):
            raise InputError(
                f"the config of {self.path} has norm_output, which vLLM and SGLang read as: feed the normed output "
                "back. Heads of SpecForge were trained without that. Add norm_output=true behind the path to feed the "
                "normed output back, or norm_output=false"
            )
        return self._flag("norm_output")

    def _taps(self, num_layers: int, answers: Answers) -> tuple[int, ...]:
        if answers.taps is not None:
            found: tuple[int, ...] = answers.taps
        elif self.target is not None:
            found = self.target.taps
        else:
            given = self.given.get(TAPS) or nested(self.given, "eagle_config", self.path).get(TAPS) or ()
            named = whole_numbers(given, TAPS, self.path)
            if named and not _is_speculators(self.given):
                raise InputError(
                    f"the config of {self.path} has {TAPS} {list(named)}; vLLM reads id k as what enters layer k, and "
                    f"SGLang as what leaves it. Add taps={'x'.join(map(str, named))} behind the path for the first, or "
                    f"taps={'x'.join(str(each + 1) for each in named)} for the second"
                )
            found = named or default_taps(num_layers)
        if not all(0 <= tap <= num_layers for tap in found):
            raise InputError(
                f"the head in {self.path} reads the hidden states {list(found)}, and this target has 0..{num_layers}; "
                "give a head that was trained for this target"
            )
        return found


def is_eagle3(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether a checkpoint is one of EAGLE-3."""
    if KIND in config or any(name.removeprefix("model.") == MASK for name in names):
        return False
    native = any(name in NATIVE for name in config.get("architectures") or [])
    return _is_speculators(config) or native or any(name.startswith("midlayer.hidden_norm") for name in names)


def eagle3_record(
    head: Eagle3Head, target: TargetShape, dtype: torch.dtype, *, name: str = ""
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and the tensors that are written.

    Args:
        name: The target's directory or hub id.
    """
    sizes = head.sizes
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    config = {
        "architectures": [ARCHITECTURE],
        "speculators_model_type": SPECULATORS,
        "speculators_version": VERSION,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "draft_vocab_size": sizes.draft_vocab_size,
        "target_hidden_size": sizes.target_hidden_size,
        "norm_before_residual": sizes.norm_before_residual,
        "norm_before_fc": sizes.norm_before_fc,
        "fc_norm": sizes.fc_norm,
        "norm_output": sizes.norm_output,
        TAPS: list(sizes.taps),
        "transformer_layer_config": {**described(sizes.layer), "vocab_size": target.vocab_size},
        "speculators_config": {
            "algorithm": SPECULATORS,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": name, "architectures": []},
        },
        TARGET: target.record(),
    }
    tensors = head.state_dict()
    if head.ids is not None:
        ids = head.ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return config, tensors


def write_eagle3(head: Eagle3Head, folder: Path, target: TargetShape, dtype: torch.dtype, *, name: str = "") -> None:
    """Write a head in the layout of speculators, as vLLM loads it.

    Args:
        name: The target's directory or hub id.
    """
    write_head(folder, *eagle3_record(head, target, dtype, name=name), dtype)


def _is_speculators(config: Mapping[str, Any]) -> bool:
    return config.get("speculators_model_type") == SPECULATORS


def _name(name: str) -> str:
    """The name of a tensor in `Eagle3Head`."""
    name = name.removeprefix("model.").replace("midlayer.", "layers.0.")
    for old, new in LEGACY.items():
        name = name.replace(f"{old}.", f"{new}.")
    return name
