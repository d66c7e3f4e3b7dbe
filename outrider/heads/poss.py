r"""PosS: EAGLE or EAGLE-3 with a specialist for each part of a draft (Huang et al. 2025).

In files, the layers of further specialists are layers 1, 2, ... of the head.

https://arxiv.org/abs/2506.03566
"""

import copy
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from outrider.core.types import Frontier, Guess, InputError, Running
from outrider.drafters.exports import Exports
from outrider.drafters.protocol import Observed
from outrider.heads.doubt import Doubt
from outrider.heads.eagle import EagleHead, EagleObjective, EagleOptions, has_specialists
from outrider.heads.eagle3 import Eagle3Head, Eagle3Options, Eagle3SizeOptions, TrainedEagle3
from outrider.heads.eagle3 import published as published_eagle3
from outrider.heads.head import Head, HeadFiles, TrainedHead
from outrider.heads.objective import HeadContext, LearntPositions
from outrider.heads.spec import HeadSpec
from outrider.heads.trunks.features import (
    FeatureHead,
    FeatureObjective,
    FeatureState,
    append_features,
    behind_committed,
    needed,
    next_pairs,
    read,
)
from outrider.heads.trunks.several import SeveralDrafter, SeveralState
from outrider.learning.attention import GroupKeys
from outrider.learning.batch import TrainBatch
from outrider.learning.options import loss, size
from outrider.lm.hf.checkpoint import KIND, MOST_COUNT, Checkpoint, TargetShape, load_into
from outrider.lm.hf.checkpoint import size as size_in
from outrider.lm.protocol import Segment
from outrider.lm.slots.head_inputs import HeadInputs
from outrider.lm.target_info import TargetInfo

NAME, STRIDE = "poss", "steps_per_specialist"
"""The value of `KIND`, and the key of a config that says how many draft steps each specialist takes."""
LAYER = re.compile(r"(?:model\.)?layers\.(\d{1,3})\.(.*)")
OF_EAGLE, OF_EAGLE3 = ("regression", "bias"), ("taps", "fc_norm", "norm_output", "norm_before_residual", "draft_vocab")
"""The options of one trunk alone."""


@dataclass(frozen=True, kw_only=True)
class PossOptions(Eagle3SizeOptions):
    """Train an EAGLE or EAGLE-3 head with position specialists: each learns some of the draft tokens.

    Attributes:
        trunk: The head whose layer is the first specialist: eagle or eagle3.
        stride: Draft steps of each specialist.
        unrolled: How many draft tokens are learnt. There are unrolled / stride specialists.
        regression: Weight of the distance between the head's features and the target's, of eagle alone.
        noise: Strength of the noise on the target's features.
        bias: Give the fusion a bias, as the authors do; of eagle alone.
        taps: The target's hidden states that eagle3 reads, such as 2x16x29; tap k enters layer k. By default a low, a
            middle and a high one.
        fc_norm: Norm each of these states; of eagle3 alone, as the next two.
    """

    trunk: str = size("eagle", among=("eagle", "eagle3"))
    stride: int = loss(1, least=1)
    unrolled: int = loss(6, least=1)
    regression: float = loss(10.0, least=0)
    noise: float = loss(0.2, least=0)
    bias: bool = size(False)

    def check(self) -> None:
        super().check()
        if self.unrolled < self.stride:
            raise InputError(
                f"the first specialist takes {self.stride} draft steps, so unrolled must be >= {self.stride}, got "
                f"{self.unrolled}"
            )
        if self.init_from is None:
            self.check_trunk(self.trunk)

    def check_trunk(self, trunk: str) -> None:
        """Raise InputError if an option of the other trunk was given."""
        other = OF_EAGLE3 if trunk == "eagle" else OF_EAGLE
        if wrong := sorted(set(self.changed()).intersection(other)):
            raise InputError(
                f"{', '.join(wrong)}: for trunk {'eagle3' if trunk == 'eagle' else 'eagle'} alone, and this is {trunk}"
            )


class PossHead(Head):
    r"""A head of EAGLE or of EAGLE-3 with a layer for each part of a draft.

    Specialist $s$ is the head with its layer replaced; all else is shared. The first specialist is the head itself.

    Attributes:
        first: The head.
        further: The layers of the further specialists.
        stride: Draft steps of each specialist but the last.

    Args:
        first: A head of one layer. The further specialists begin with copies of it.
        count: How many specialists.

    Raises:
        InputError: A number is too small, or the head has several layers.

    References:
        Huang et al. 2025. https://arxiv.org/abs/2506.03566
    """

    def __init__(self, first: FeatureHead, count: int, stride: int) -> None:
        super().__init__()
        if count < 1 or stride < 1:
            raise InputError(f"specialists and their draft steps must be >= 1, got {count} and {stride}")
        if len(first.layers) != 1:
            raise InputError(f"a head with specialists has one layer, and this one has {len(first.layers)}")
        self.further = nn.ModuleList(copy.deepcopy(first.layers) for _ in range(count - 1))
        self.first, self.stride = first, stride

    @classmethod
    def new(cls, options: PossOptions, context: HeadContext) -> "PossHead":
        of_eagle = options.trunk == "eagle"
        kind: Any = EagleHead if of_eagle else Eagle3Head
        of = EagleOptions if of_eagle else Eagle3Options
        known = {each.name for each in fields(of)}
        first = kind.new(of(**{name: value for name, value in vars(options).items() if name in known}), context)
        return cls(first, options.unrolled // options.stride, options.stride)

    @classmethod
    def load(cls, checkpoint: Checkpoint, target: TargetInfo, trained: TrainedHead) -> "PossHead":
        stride_hint = trained.stride if isinstance(trained, TrainedPoss) else None
        path, config = checkpoint.path, checkpoint.config
        if config.get(STRIDE) is None and stride_hint is None:
            raise InputError(
                f"the config of {path} does not say how many draft steps each specialist takes; add stride=1, 2 or 3 "
                "behind the path, as in poss:path=...,stride=3"
            )
        stride = size_in(config, STRIDE, path, default=stride_hint, most=MOST_COUNT)
        shared: dict[str, Tensor] = {}
        further: dict[int, dict[str, Tensor]] = {}
        for name, tensor in checkpoint.tensors().items():
            match = LAYER.fullmatch(name)
            if match is None or match[1] == "0":
                shared[name] = tensor
            elif not name.endswith("rotary_emb.inv_freq"):
                further.setdefault(int(match[1]), {})[match[2]] = tensor
        if "transformer_layer_config" not in config:
            config = {**config, "num_hidden_layers": 1}
        fused = any(name.endswith("layers.0.hidden_norm.weight") for name in shared)
        kind: Any = Eagle3Head if fused else EagleHead
        # The trunk keeps what its layers' config says, and an export of the first specialist is no head of PosS.
        config = {key: value for key, value in config.items() if key not in (KIND, STRIDE)}
        first = kind.load(replace(checkpoint, own_config=config, own_tensors=shared), target, trained)
        head = cls(first, 1 + len(further), stride)
        places = {str(i): cast(nn.ModuleList, layers)[0] for i, layers in enumerate(head.further, start=1)}
        ordered = [further[number] for number in sorted(further)]
        named = {
            f"layers.{i}.{name}": tensor
            for i, layer_tensors in enumerate(ordered, start=1)
            for name, tensor in layer_tensors.items()
        }
        load_into(nn.ModuleDict({"layers": nn.ModuleDict(places)}), named, path)
        return head

    @classmethod
    def init_from(cls, place: TrainedHead, options: PossOptions, context: HeadContext) -> "PossHead":
        """A head with specialists, or an EAGLE or EAGLE-3 head whose layer is copied into every specialist."""
        checkpoint = place.checkpoint
        if published(checkpoint.config, checkpoint.names):
            if checkpoint.config.get(STRIDE) is None and isinstance(place, TrainedPoss):
                place = replace(place, stride=options.stride)
            head = cls.load(checkpoint, context.info, place)
        else:
            kind: Any = Eagle3Head if published_eagle3(checkpoint.config, checkpoint.names) else EagleHead
            first = kind.load(checkpoint, context.info, place)
            head = cls(first, options.unrolled // options.stride, options.stride)
        options.check_trunk("eagle" if head.of_eagle else "eagle3")
        if head.specialist(options.unrolled - 1) < len(head.further):
            raise InputError(
                f"{head.num_specialists} specialists of {head.stride} draft steps each do not all learn from "
                f"{options.unrolled} passes; unrolled must be >= {1 + head.stride * len(head.further)}"
            )
        return head

    @property
    def of_eagle(self) -> bool:
        """Whether it is a head of EAGLE, not of EAGLE-3."""
        return isinstance(self.first, EagleHead)

    @property
    def num_specialists(self) -> int:
        return 1 + len(self.further)

    @property
    def first_steps(self) -> int | None:
        return self.stride if self.further else None

    @property
    def feature_size(self) -> int:
        """Width of the features."""
        return self.first.feature_size

    @property
    def ids(self) -> Int[Tensor, " width"] | None:
        """The tokens that it can guess, ascending; None: all."""
        return cast(Tensor | None, self.first.ids)

    def reads(self, num_layers: int) -> tuple[int, ...]:
        return self.first.reads(num_layers)

    def fuse(self, states: Float[Tensor, "*batch all"]) -> Float[Tensor, "*batch hidden"]:
        return self.first.fuse(states)

    def next_feature(self, head_output: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch hidden"]:
        return self.first.next_feature(head_output)

    def logits(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch width"]:
        return self.first.logits(hidden)

    def freeze(self) -> None:
        self.first.freeze()

    def doubts(self, target: TargetInfo) -> Sequence[Doubt]:
        return self.first.doubts(target)

    def specialist(self, step: int) -> int:
        """The number of the specialist of a draft step. Both are counted from 0."""
        return min(step // self.stride, len(self.further))

    def reader(self, number: int) -> FeatureHead:
        """A specialist."""
        if number == 0:
            return self.first
        twin = copy.copy(self.first)
        twin._modules = {**self.first._modules, "layers": self.further[number - 1]}
        return twin

    def record(self, target: TargetShape, dtype: torch.dtype, name: str) -> HeadFiles:
        """As its head is written, with layers 1, 2, ... for the further specialists."""
        config, tensors = self.first.record(target, dtype, name)
        layers = {
            f"layers.{number}.{key}": tensor
            for number, layer in enumerate(self.further, start=1)
            for key, tensor in cast(nn.ModuleList, layer)[0].state_dict().items()
        }
        return {**config, "architectures": ["PossHead"], KIND: NAME, STRIDE: self.stride}, {**tensors, **layers}

    def exported(self, engine: str, target: TargetShape, dtype: torch.dtype, name: str) -> HeadFiles:
        """Other engines run the first specialist alone, as the head that it is."""
        return self.first.exported(engine, target, dtype, name)

    def engine_names(self, of_kind: Exports) -> Exports:
        """Those of the first specialist's kind."""
        return of_kind if self.of_eagle else replace(of_kind, vllm="eagle3", sglang="EAGLE3")


@dataclass(frozen=True, kw_only=True)
class PossDrafter(SeveralDrafter[SeveralState]):
    r"""Guess draft step i (from 0) with specialist $\min(\lfloor i / n \rfloor, \text{last})$.

    Each specialist has keys and values of its own. When a draft reaches it, it reads in one forward what it lacks: the
    committed pairs since it was last reached, with the target's features; the nodes above the new ones, with the
    features that were output there; and the new nodes. Its committed pairs stay. So a switch costs no forward, and a
    specialist that no draft reaches reads only long stretches of committed pairs.

    Attributes:
        lm: The first specialist.
        further: The further specialists.
        stride: $n$.

    References:
        Huang et al. 2025. https://arxiv.org/abs/2506.03566
    """

    stride: int = 1

    @classmethod
    def of(cls, head: PossHead, target: TargetInfo, trained: TrainedHead) -> "PossDrafter":  # type: ignore[override]
        """The drafter with a head that has specialists."""
        fields = cls.fields_of(head.first, target, trained)
        further = [trained.lm(head.reader(number), target) for number in range(1, head.num_specialists)]
        return cls(**fields, further=tuple(further), stride=head.stride)

    def observe(self, states: Sequence[Running], observed: Observed) -> None:
        features = self.features(observed.taps)
        for number, lm in enumerate(self.lms):
            feature_states = [self.state_of(state).parts[number] for state in states]
            many = append_features(lm, feature_states, features, observed.offsets)
            if many:
                counts = [feature_states[i].num_pending - 1 for i in many]
                read(lm, next_pairs(lm, [feature_states[i] for i in many], [states[i] for i in many], counts, "none"))
                for i, count in zip(many, counts, strict=True):
                    feature_states[i].forget(count)

    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess:
        guess = super().begin(states, depths)
        for drafter_state in map(self.state_of, states):
            drafter_state.fed, drafter_state.nodes = {0: -1}, {}
        return guess

    def expand(self, states: Sequence[Running], frontier: Frontier) -> Guess:
        number = min(int(frontier.depths[0]) // self.stride, len(self.further))
        groups = list(self.by_owner(states, frontier))
        segments = self._segments(number, groups)
        extension = self.lms[number].extend(segments)
        parts = cast(Tensor, extension.features).split([len(segment.tokens) for segment in segments])
        for (state, nodes), part in zip(groups, parts, strict=True):
            self.state_of(state).head_output |= dict(zip(nodes, part[len(part) - len(nodes) :].unbind(0), strict=True))
        return Guess(logits=extension.logits, short_list=self.short_list)

    def commit(self, states: Sequence[Running], paths: Sequence[Sequence[int]]) -> None:
        super().commit(states, paths)
        for number, lm in enumerate(self.further, start=1):
            reached = [feature_state for state in states if (feature_state := self.state_of(state).parts[number]).fed]
            lm.commit({feature_state.slot: range(feature_state.fed[0] + 1) for feature_state in reached})
            for feature_state in reached:
                feature_state.forget(feature_state.fed[0] + 1)
                feature_state.fed = {}

    def needs(self, state: object, length: int) -> int:
        drafter_state = self.checked(state)
        # What all specialists can go on from.
        return min(needed(lm, each, length) for lm, each in zip(self.lms, drafter_state.parts, strict=True))

    def usable(self, state: SeveralState, length: int) -> list[tuple[int, int]]:
        first = self.needs(state, length)
        known = [lm.length(each.slot) for lm, each in zip(self.lms, state.parts, strict=True)]
        return [(min(count, first, max(0, length - 1)), max(0, first - count)) for count in known]

    def _segments(self, number: int, groups: Sequence[tuple[Running, list[int]]]) -> list[Segment]:
        """What a specialist must read of each request to guess after some nodes. Their logits are wanted."""
        lm, drafts = self.lms[number], [self.state_of(state) for state, _ in groups]
        feature_states = [draft.parts[number] for draft in drafts]
        committed = self._committed(number, [state for state, _ in groups])
        lacking = [
            [*_unfed(draft, feature_state, nodes), *nodes]
            for draft, feature_state, (_, nodes) in zip(drafts, feature_states, groups, strict=True)
        ]
        new = [(draft, node) for draft, nodes in zip(drafts, lacking, strict=True) for node in nodes]
        tokens = torch.stack([draft.nodes[node].token for draft, node in new]).to(lm.device, non_blocking=True)
        features = self.next_feature(torch.stack([draft.head_output[draft.nodes[node].parent] for draft, node in new]))
        segments = []
        parts = behind_committed(committed, tokens, features, [len(nodes) for nodes in lacking])
        for i, (draft, feature_state, nodes, (_, wanted)) in enumerate(
            zip(drafts, feature_states, lacking, groups, strict=True)
        ):
            own_tokens, own_features = parts[i]
            parents = list(range(-1, len(own_tokens) - len(nodes) - 1))
            for node in nodes:
                parents.append(feature_state.fed[draft.nodes[node].parent])
                feature_state.fed[node] = feature_state.fed[0] + len(feature_state.fed)
            segments.append(
                Segment(
                    slot=feature_state.slot,
                    tokens=own_tokens,
                    parents=np.array(parents),
                    logits=len(wanted),
                    features=own_features,
                )
            )
        return segments

    def _committed(self, number: int, states: Sequence[Running]) -> dict[int, Segment]:
        """The committed pairs of the requests whose draft reaches a specialist for the first time, by their places.
        Notes the pending number of the newest of them.
        """
        feature_states = [self.state_of(state).parts[number] for state in states]
        new = [i for i, feature_state in enumerate(feature_states) if 0 not in feature_state.fed]
        if not new:
            return {}
        counts = [feature_states[i].num_pending for i in new]
        for i, count in zip(new, counts, strict=True):
            feature_states[i].fed[0] = count - 1
        pairs = next_pairs(self.lms[number], [feature_states[i] for i in new], [states[i] for i in new], counts, "last")
        return dict(zip(new, pairs, strict=True))


class PossObjective(FeatureObjective):
    """What the trunk learns: EAGLE's losses, or EAGLE-3's.

    References:
        Huang et al. 2025. https://arxiv.org/abs/2506.03566
    """

    head: PossHead  # type: ignore[assignment]
    options: PossOptions

    @property
    def detached(self) -> bool:  # type: ignore[override]
        """As the trunk's objective has it."""
        return self.head.of_eagle

    def head_tokens(self, length: int) -> int:
        # Each specialist runs in its own passes.
        return super().head_tokens(length) // self.head.num_specialists

    def passes(self) -> Callable[[int, HeadInputs], Float[Tensor, "rows length hidden"]]:
        """A specialist reads the pairs of all passes before its first one with its own keys and values."""
        before: list[HeadInputs] = []
        reader, cache = self.head.reader(0), None

        def run(number: int, inputs: HeadInputs) -> Float[Tensor, "rows length hidden"]:
            nonlocal reader, cache
            if number and self.head.specialist(number) != self.head.specialist(number - 1):
                reader, cache = self.head.reader(self.head.specialist(number)), GroupKeys()
                for each in before:
                    reader.prefill(replace(each, cache=cache))
            before.append(inputs)
            output: Tensor = reader(inputs if cache is None else replace(inputs, cache=cache))
            return output

        return run

    def auxiliary_loss(
        self, batch: TrainBatch, hidden: Float[Tensor, "rows length hidden"], number: int, places: LearntPositions
    ) -> Float[Tensor, ""] | None:
        """EAGLE's, of a head of EAGLE."""
        if not self.head.of_eagle:
            return None
        return EagleObjective.auxiliary_loss(cast(EagleObjective, self), batch, hidden, number, places)


@dataclass(frozen=True, kw_only=True)
class TrainedPoss(TrainedEagle3):
    """A head with position specialists on disk. Its other fields are those of `eagle3`, for a head on its trunk.

    Attributes:
        stride: Draft steps of each specialist, where the config does not say it.
    """

    stride: int | None = None


def published(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether a checkpoint has position specialists."""
    if KIND in config:
        return bool(config[KIND] == NAME)
    bare = {name.removeprefix("model.") for name in names}
    return "fc.weight" in bare and "layers.0.mlp.up_proj.weight" in bare and has_specialists(bare)


def _unfed(draft: SeveralState, feature_state: FeatureState, nodes: Sequence[int]) -> list[int]:
    """The nodes above some nodes that a specialist has not read yet, parents first."""
    unfed: set[int] = set()
    for node in nodes:
        above = draft.nodes[node].parent
        while above not in feature_state.fed and above not in unfed:
            unfed.add(above)
            above = draft.nodes[above].parent
    return sorted(unfed)


SPEC = HeadSpec(
    name=NAME,
    head=PossHead,
    drafter=PossDrafter,
    published=published,
    trained=TrainedPoss,
    options=PossOptions,
    objective=PossObjective,
    exports=Exports(vllm="eagle", sglang="EAGLE", instead="eagle"),
)
