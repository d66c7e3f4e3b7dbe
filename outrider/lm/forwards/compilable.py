"""What can be compiled ahead of time: a model's forward or a head's, as a function of tensors alone."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.lm.fingerprint import fingerprint, shape_of, weights_of
from outrider.lm.forwards.grouped import group
from outrider.lm.forwards.kept import keep_rotations
from outrider.lm.forwards.merged import as_blocks
from outrider.lm.forwards.twin import twin
from outrider.lm.hf.anatomy import Anatomy
from outrider.lm.hf.cache_keyword import cache_keyword
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead
from outrider.lm.hf.taps import attach
from outrider.lm.slots.head_inputs import HeadInputs
from outrider.lm.slots.masks import MaskBuilder
from outrider.lm.slots.window import Window

OWN_MASKS = frozenset({"doge"})
"""Models whose layers change the mask by the values of their keys."""
GATHERED = 16
"""Most tokens of a forward that copies the weights of each token's experts."""


class ForwardKind(NamedTuple):
    """A kind of forward: whether its nodes have features, whether logits are wanted, and which hidden states."""

    features: bool = True
    logits: bool = True
    taps: tuple[int, ...] = ()


KINDS = (ForwardKind(),)
"""The kinds that a head is compiled for, unless its `kinds` names others."""


def returning(taps: Sequence[int] = ()) -> ForwardKind:
    """The kind of a model's forwards that return some hidden states."""
    return ForwardKind(features=False, taps=tuple(dict.fromkeys(taps)))


@dataclass(frozen=True, kw_only=True)
class CompilableModel:
    """A transformers model: what a library of it is called, is made of, and can do.

    Attributes:
        model: The model.
    """

    model: PreTrainedModel

    @property
    def name(self) -> str:
        return Anatomy.of(self.model.config).name

    @property
    def parts(self) -> Sequence[nn.Module]:
        return [self.model]

    @property
    def shape(self) -> str:
        return shape_of(self.model)

    @property
    def weights(self) -> str | None:
        return weights_of(self.model)

    @property
    def widest(self) -> int | None:
        """Most tokens of a forward; None: any number. With experts the graph copies the weights of each token's ones:
        transformers' other ways to compute them cannot be exported.
        """
        return GATHERED if self.model._can_set_experts_implementation() else None

    @property
    def unpadded(self) -> bool:
        """Whether the forward computes for nodes alone what is not attention: it can where attention is a function that
        the model looks up, and has the mask that it is given.
        """
        looked_up = Anatomy.of(self.model.config).attention == "sdpa" and self.model._supports_attention_backend
        return looked_up and self.model.config.model_type not in OWN_MASKS

    def traced(self, kind: ForwardKind, builder: MaskBuilder) -> "TracedModel":
        """Its forwards of a kind as a function."""
        return TracedModel(self, kind, builder)


class TracedModel(nn.Module):
    """A model's logits, and the hidden states that are tapped.

    Attributes:
        own: The model's twin, whose layers nothing else uses.
    """

    def __init__(self, whose: CompilableModel, kind: ForwardKind, builder: MaskBuilder) -> None:
        super().__init__()
        self.twin = model = twin(whose.model)
        self._cache, self._kind, self._builder = cache_keyword(type(model)), kind, builder
        keep_rotations(model)
        as_blocks(model)
        group(model)
        if whose.widest is not None:
            model.set_experts_implementation("batched_mm")
        seen: dict[int, Tensor] = {}
        attach(Anatomy.of(model).layers, kind.taps, seen)
        # The exporter takes a dict that is an attribute for a part of the model's state.
        self._seen = seen.__getitem__
        model.eval()

    def forward(
        self,
        tokens: Tensor,
        features: None,
        positions: Tensor,
        columns: Tensor,
        masks: Sequence[Tensor],
        window: Window,
    ) -> tuple[Tensor, ...]:
        logits = self.twin(
            input_ids=tokens,
            attention_mask=_shaped(self._builder.spans, masks),
            position_ids=positions,
            use_cache=True,
            logits_to_keep=columns,
            **{self._cache: window},
        ).logits
        return logits, *map(self._seen, self._kind.taps)


@dataclass(frozen=True, kw_only=True)
class CompilableHead:
    """A drafter's head, and its target's embedding and output layer if it uses them: the same of a head.

    Attributes:
        head: The head.
        unpadded: False: it computes for padded rows.
    """

    head: nn.Module
    unpadded: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return type(self.head).__name__

    @property
    def embedding_and_head(self) -> EmbeddingAndHead | None:
        """What it uses of its target."""
        return getattr(self.head, "embedding_and_head", None)

    @property
    def parts(self) -> Sequence[nn.Module]:
        return [self.head] if self.embedding_and_head is None else [self.head, self.embedding_and_head.modules]

    @property
    def shape(self) -> str:
        sizes = [(name, tuple(weight.shape)) for name, weight in self.head.state_dict().items()]
        dtype = next(self.head.parameters()).dtype
        described = [str(self.head), str(dtype), sizes, getattr(self.embedding_and_head, "target", None)]
        return hashlib.sha256(repr(described).encode()).hexdigest()

    @property
    def weights(self) -> str | None:
        return fingerprint(self.head, None if self.embedding_and_head is None else self.embedding_and_head.modules)

    def traced(self, kind: ForwardKind, builder: MaskBuilder) -> "TracedHead":
        """Its forwards as a function."""
        return TracedHead(self)


class TracedHead(nn.Module):
    """A head's logits, where they are wanted, and its output features.

    Attributes:
        own: The head's twin, whose layers nothing else uses.
    """

    def __init__(self, whose: CompilableHead) -> None:
        super().__init__()
        self.twin = twin(whose.head).eval()
        if (embedding_and_head := whose.embedding_and_head) is not None:
            # The exporter looks for weights in modules.
            self.target = embedding_and_head.modules
            unpacked = replace(embedding_and_head, head=embedding_and_head.unpacked or embedding_and_head.head)
            setattr(self.twin, "embedding_and_head", unpacked)  # noqa: B010

    def forward(
        self,
        tokens: Tensor,
        features: Tensor | None,
        positions: Tensor,
        columns: Tensor | None,
        masks: Sequence[Tensor],
        window: Window,
    ) -> tuple[Tensor, ...]:
        inputs = HeadInputs(tokens=tokens, features=features, positions=positions, mask=masks[0], cache=window)
        hidden: Tensor = self.twin(inputs)
        if columns is None:
            return (hidden,)
        logits: Tensor = self.twin.logits(hidden[:, columns])  # type: ignore[operator]
        return logits, hidden


def _shaped(spans: object, masks: Sequence[Tensor]) -> object:
    """Masks as a model takes them, from a flat list."""
    if not isinstance(spans, Mapping):
        return masks[0]
    left = iter(masks)
    return {kind: None if span is None else next(left) for kind, span in spans.items()}
