"""A model's two ends as functions: tokens to embeddings, and last hidden states to logits.

Relied on in transformers (read in 5.17 - 5.23, run in 5.23): `model.get_input_embeddings()`; a causal LM's forward
calls the one of its children that holds the layers with its `inputs_embeds`, takes `last_hidden_state` or element 0 of
what that returns, and computes logits from it (23 classes scale or cap them); `last_hidden_state` is the output of a
module beside the layers, the final norm, or the output of the last layer.

The output layer is the model's own forward around a stand-in for everything below it, so that logits are scaled and
capped correctly. The final norm is found by watching one forward, not by its name.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.core.types import InputError
from outrider.lm.hf.anatomy import Anatomy
from outrider.lm.hf.narrow import LEAVE, cut
from outrider.lm.hf.spread import DISPATCHED, Returning, is_dispatched, is_spread

_TOLERANCE = 1e-2


@dataclass(frozen=True, kw_only=True)
class EmbeddingAndHead:
    """The functions of the target that a drafter may use.

    Attributes:
        embed: Input embeddings of tokens.
        norm: The final norm of the last layer's output.
        head: Logits from normed states.
        unpacked: The same from weights that are not packed; None: `head` is.
        pack: Makes packed copies of modules, where `head` is packed.
        modules: The target's modules that these functions use.
        target: A hash of what the target is without its weights.
        ids: The tokens that `head` makes logits of, ascending; None: all.
    """

    embed: Callable[[Int[Tensor, "*batch"]], Float[Tensor, "*batch hidden"]]
    norm: Callable[[Float[Tensor, "*batch hidden"]], Float[Tensor, "*batch hidden"]]
    head: Callable[[Float[Tensor, "*batch hidden"]], Float[Tensor, "*batch vocab"]]
    unpacked: Callable[[Float[Tensor, "*batch hidden"]], Float[Tensor, "*batch vocab"]] | None = None
    pack: Callable[[nn.Module], nn.Module] | None = None
    modules: nn.Module = field(default_factory=nn.ModuleList)
    target: str = ""
    ids: tuple[int, ...] | None = None

    def cut(self, ids: Sequence[int]) -> "EmbeddingAndHead":
        """The same ends, whose output layer makes logits of some tokens alone.

        Args:
            ids: These tokens, ascending.

        Raises:
            InputError: The output layer is no plain linear layer with a row per token.
        """
        whole = self.unpacked or self.head
        if not isinstance(whole, OutputLayer):
            raise InputError(f"the output layer of this target cannot be cut to some tokens; {LEAVE}")
        plain = whole.cut(ids)
        whole_layer, short_layer = whole.layer, plain.layer
        kept = [module for module in self.modules.children() if module is not whole_layer]
        return replace(
            self,
            head=plain if self.pack is None else plain.copied(self.pack),
            unpacked=None if self.pack is None else plain,
            modules=nn.ModuleList(kept if short_layer is None else [*kept, short_layer]),
            target=f"{self.target} cut to {len(ids)} tokens",
            ids=tuple(ids),
        )

    def logits(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch vocab"]:
        """Logits from normed states of any dtype and device, computed in the dtype of the target."""
        weights = chain(getattr(self.embed, "parameters", tuple)(), self.modules.parameters())
        weight = next(weights, hidden)
        return self.head(hidden.to(weight.device, weight.dtype))

    def __deepcopy__(self, memo: dict[int, object]) -> "EmbeddingAndHead":
        """Returns itself: a copy of a drafter's head does not copy its target."""
        return self


class _Below(nn.Module):
    """Stands for the part of a model that holds its layers: it returns the embeddings that it gets."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        # The tuple keeps torch from registering it as a submodule.
        self._original = (original,)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_original"][0], name)

    @property
    def decoder(self) -> "_Below":
        """OPT's forward calls its model's decoder."""
        return self

    def forward(self, input_ids: Tensor | None = None, *, inputs_embeds: Tensor, **_: object) -> "_Said":
        return _Said(inputs_embeds)


class _Said:
    """The output of a model below its output layer. It has hidden states and nothing else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, place: int) -> Tensor:
        if place:
            raise IndexError(place)
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None


@torch.inference_mode()
def find_embedding_and_head(model: PreTrainedModel, anatomy: Anatomy) -> EmbeddingAndHead:
    """The ends of a model, after a test on a short text.

    Raises:
        InputError: The model works in a way unknown here.
    """
    embedding = model.get_input_embeddings()
    if anatomy.layers is None:
        raise InputError(
            f"{anatomy.name} has no single list of decoder layers, so a drafter cannot read its hidden states"
        )
    norm, seen = _final_norm(model, anatomy.layers, anatomy.name)
    if is_spread(anatomy.layers) and isinstance(norm, nn.Module):
        # A drafter is on the device of the model's inputs.
        norm = Returning(norm, model.device)
    head = output_layer(model)
    try:
        ours = head(norm(seen.leaving))
    except (AttributeError, TypeError, ValueError, IndexError, RuntimeError) as error:
        raise InputError(f"the output layer of {anatomy.name} cannot be used by a drafter: {error}") from error
    if ours.shape != seen.logits.shape or not _close(ours, seen.logits):
        raise InputError(
            f"the output layer of {anatomy.name} cannot be used by a drafter: what follows its last layer works in a "
            "way unknown here"
        )
    used = [embedding, *([norm] if isinstance(norm, nn.Module) else []), *_above(model).values()]
    return EmbeddingAndHead(embed=embedding, norm=norm, head=head, modules=nn.ModuleList(used))


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """The last layer's output for a short text, and the logits."""

    leaving: Float[Tensor, "1 tokens hidden"]
    logits: Float[Tensor, "1 tokens vocab"]


def _final_norm(model: PreTrainedModel, layers: nn.ModuleList, name: str) -> tuple[Callable[[Tensor], Tensor], _Seen]:
    """The module that takes the last layer's output, and what was seen of a short text."""
    left: list[Tensor] = []
    followers: list[nn.Module] = []
    final: list[Tensor] = []

    def leaving(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        left.append(output[0] if isinstance(output, tuple) else output)

    def following(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if left and inputs and inputs[0] is left[-1]:
            followers.append(module)

    decoder = next(module for module in model.modules() if any(child is layers for child in module.children()))
    hooks = [layers[-1].register_forward_hook(leaving)]
    hooks += [child.register_forward_pre_hook(following) for child in decoder.children()]
    hooks.append(decoder.register_forward_hook(lambda module, inputs, output: final.append(output[0])))
    try:
        tokens = torch.arange(3, 7, device=model.device)[None] % model.config.get_text_config(decoder=True).vocab_size
        # transformers makes a mask by values, which a model without weights does not have.
        options = {"attention_mask": torch.zeros(1, 1, 4, 4, device="meta")} if tokens.is_meta else {}
        logits = model(input_ids=tokens, use_cache=False, **options).logits
    finally:
        for hook in hooks:
            hook.remove()
    if not left or not final:
        raise InputError(f"{name} runs its layers in a way unknown here, so a drafter cannot read their states")
    if left[-1].dim() != 3:
        raise InputError(f"{name} passes several residual streams from layer to layer, and drafters can read one")
    seen = _Seen(leaving=left[-1], logits=logits)
    if final[-1] is left[-1]:
        return _same, seen
    for module in followers:
        normed = module(left[-1])
        if normed.shape == final[-1].shape if normed.is_meta else torch.equal(normed, final[-1]):
            return module, seen
    raise InputError(f"the final norm of {name} was not found, so a drafter cannot use its output layer")


def _close(ours: Tensor, theirs: Tensor) -> bool:
    """Whether logits are equal up to roundings. Those of a model without weights have no values, so all are."""
    if ours.is_meta:
        return True
    spread = float(theirs.max() - theirs.min())
    return float((ours - theirs).abs().max()) <= _TOLERANCE * max(spread, 1e-9)


def _same(hidden: Tensor) -> Tensor:
    return hidden


class OutputLayer:
    """Logits from normed states, by a model's own forward with a stand-in for the part of it that holds the layers.

    Attributes:
        layer: The layer itself, without what scales or caps its logits; None where it is a copy or there is none.

    Args:
        shell: The model with the stand-in.
    """

    def __init__(self, shell: PreTrainedModel, layer: nn.Module | None) -> None:
        self._shell, self.layer = shell, layer
        self._spread = layer is not None and is_dispatched(layer)

    def __call__(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch vocab"]:
        # Copied without asking whether it must be: an exported graph would then serve numbers of one kind only.
        flat = hidden.clone(memory_format=torch.contiguous_format).view(1, -1, hidden.shape[-1])
        logits: Tensor = self._shell(inputs_embeds=flat, use_cache=False).logits
        if self._spread:
            logits = logits.to(hidden.device)
        return logits.reshape(*hidden.shape[:-1], logits.shape[-1])

    def cut(self, ids: Sequence[int]) -> "OutputLayer":
        """The same for some tokens alone, in this order. Raises InputError if there is no plain layer to cut."""
        name = next((name for name, child in self._shell.named_children() if child is self.layer), None)
        if name is None:
            raise InputError(f"the output layer of {type(self._shell).__name__} cannot be cut to some tokens; {LEAVE}")
        short = cut(self.layer, ids)
        return OutputLayer(_with(self._shell, {name: short}), short)

    def copied(self, by: Callable[[nn.Module], nn.Module]) -> "OutputLayer":
        """The same from copies of its modules.

        Args:
            by: Copies a module with all of its children, as `packed` does.
        """
        above = {name: child for name, child in self._shell.named_children() if not isinstance(child, _Below)}
        return OutputLayer(_with(self._shell, dict(by(nn.ModuleDict(above))._modules)), None)


def output_layer(model: PreTrainedModel) -> OutputLayer:
    """Logits from normed states, by the model's own forward with a stand-in for the part of it that holds the layers.

    Args:
        model: A model with a single list of layers; it may be a packed one.
    """
    above = _above(model)
    [below] = [name for name, _ in model.named_children() if name not in above]
    return OutputLayer(_with(model, {below: _Below(getattr(model, below))}), model.get_output_embeddings())


def _with(model: PreTrainedModel, children: Mapping[str, nn.Module | None]) -> PreTrainedModel:
    """A model that shares everything with another but some of its children."""
    shell = copy.copy(model)
    if is_dispatched(model):
        # Its `forward` is bound to the model.
        for name in DISPATCHED:
            vars(shell).pop(name, None)
    shell._modules = {**model._modules, **children}
    return shell


def _above(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The model's children but the one that holds its layers."""
    layers = Anatomy.of(model).layers
    below = next(name for name, child in model.named_children() if any(part is layers for part in child.modules()))
    return {name: child for name, child in model.named_children() if name != below}
