r"""ParallelSpec: a decoder layer that guesses all tokens of a draft in one forward, at mask slots (2024).

Its files have two layouts: ours, with a learnt vector for each slot, and that of P-EAGLE heads, which are heads of
EAGLE-3 with one vector for all slots.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from reprlib import repr as short
from typing import Any, ClassVar, cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedConfig

from outrider.core.dice import Purpose, step_generator
from outrider.core.types import Guess, InputError, Running
from outrider.drafters.exports import Exports
from outrider.drafters.marginal import MarginalDrafter
from outrider.heads.eagle3 import MASK, SPECULATORS, Eagle3Head, TrainedEagle3
from outrider.heads.head import HeadFiles, TrainedHead
from outrider.heads.objective import HeadContext, LearntPositions, learnt_places
from outrider.heads.parts.layer_config import described, layer_config, usual_layer
from outrider.heads.parts.layers import DecoderLayer
from outrider.heads.spec import HeadSpec
from outrider.heads.trunks.features import FeatureDrafter, FeatureHead, FeatureObjective, FeatureState
from outrider.learning.attention import GroupKeys
from outrider.learning.batch import PADDING, Document, TrainBatch, on_device
from outrider.learning.options import HeadOptions, loss, size
from outrider.lm.hf.checkpoint import KIND, MOST_COUNT, TARGET, Checkpoint, TargetShape, build_module, nested
from outrider.lm.hf.checkpoint import size as size_in
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead
from outrider.lm.protocol import Segment
from outrider.lm.slots.head_inputs import HeadInputs
from outrider.lm.target_info import TargetInfo

NAME = "parallel"
"""The value of the key `KIND`."""
FORMS = ("eagle", "medusa")
"""What a real position reads: the next token beside the target's state, or the state alone."""
STD = 0.02
"""Spread of new mask slots."""
PEAGLE = "peagle"
"""The `speculators_model_type` of P-EAGLE heads."""
DEPTHS = "num_depths"
"""The key of AutoModel's files that says how many tokens a P-EAGLE head has learnt to guess at once."""
MASK_IDS = ("mask_token_id", "pard_token")
"""The keys of a config that name the mask token of a P-EAGLE head: that of trainers, and vLLM's own."""
TOKENS = "num_speculative_tokens"
"""The key of a config in the authors' layout that says how many tokens a P-EAGLE head drafts."""


@dataclass(frozen=True, kw_only=True)
class ParallelOptions(HeadOptions):
    """Train a parallel head (ParallelSpec): a layer that guesses all draft tokens in one forward, at mask slots.

    Attributes:
        decay: The weight of each draft token in the loss, as a share of the weight of the token before it. By default
            0.8.
        form: What the head reads of a text: the target's last state beside the next token (eagle), or the state alone
            (medusa).
        slots: Mask slots; the head drafts one token more. By default one less than --depth.
        layers: Decoder layers.
        num_groups: Most groups of slots of a text in a step, drawn anew each time it comes. By default one behind every
            token.
        noise: Strength of the noise on the target's states.
        intermediate_size: Width of the feed-forward. By default the target's.
    """

    decay: float = loss(0.8, above=0)
    form: str = size("eagle", among=FORMS)
    slots: int | None = size(None, least=0)
    layers: int = size(1, least=1)
    num_groups: int | None = loss(None, least=1)
    noise: float = loss(0.0, least=0)
    intermediate_size: int | None = size(None, least=1)


class ParallelHead(FeatureHead):
    r"""With the target's normed last state $f_t$, a position $t$ of the text reads

    $u_t = W_{fc} [E(x_{t+1}); f_t]$ in the form `eagle`, and $u_t = f_t$ in the form `medusa`.

    Behind the last position $n$ stand the slots $k = 1 \ldots K$ at the positions $n + k$. Slot k reads a learnt vector
    $m_k$ in the place of $[E; f]$ or of $f$. A slot sees all of the text, the slots before it, and itself. What the
    layers return at $n$ guesses the first token behind the anchor $x_{n+1}$, and slot k guesses the one k tokens later.
    The target's output layer makes the logits.

    The token $-k$ stands for slot k. Without slots, the form `eagle` is an EAGLE head.

    Args:
        config: The sizes of its layers.
        embedding_and_head: Those of the target.
        vocab_size: Width of the target's logits.
        form: What a position of the text reads.
        num_slots: $K$.

    References:
        ParallelSpec 2024. https://arxiv.org/abs/2410.05589
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        embedding_and_head: EmbeddingAndHead,
        *,
        vocab_size: int,
        form: str = "eagle",
        num_slots: int = 4,
    ) -> None:
        super().__init__(config, embedding_and_head, vocab_size=vocab_size, own_embedding=False)
        if form not in FORMS:
            raise InputError(f"the form of a parallel head must be eagle or medusa, got {short(form)}")
        width = config.hidden_size
        self.ids, self.form, self.num_slots = None, form, num_slots
        self.slots = nn.Parameter(STD * torch.randn(num_slots, 2 * width if form == "eagle" else width))
        self.fc = nn.Linear(2 * width, width, bias=False) if form == "eagle" else nn.Identity()
        self.layers = nn.ModuleList(
            DecoderLayer(config, i, input_norm=i > 0 or form == "medusa") for i in range(config.num_hidden_layers)
        )

    @classmethod
    def new(cls, options: "ParallelOptions", context: HeadContext) -> "ParallelHead":
        info = context.info
        layer = usual_layer(context.anatomy, vocab_size=info.vocab_size, intermediate_size=options.intermediate_size)
        layer.num_hidden_layers = options.layers
        num_slots = context.depth - 1 if options.slots is None else options.slots
        return cls(layer, info.embedding_and_head(), vocab_size=info.vocab_size, form=options.form, num_slots=num_slots)

    @classmethod
    def load(cls, checkpoint: Checkpoint, target: TargetInfo, trained: TrainedHead) -> Any:
        """A head of this class, or a `PEagleHead`."""
        path, config = checkpoint.path, checkpoint.config
        if is_peagle(config, checkpoint.names):
            return PEagleHead.load(checkpoint, target, trained)
        if not is_ours(config):
            raise InputError(f"{path} holds no parallel head: its config has no {KIND} {NAME!r}")
        layer = layer_config(nested(config, "layer", path), path)
        num_slots = size_in(config, "num_slots", path, least=0, most=MOST_COUNT)
        if isinstance(trained, TrainedParallel) and trained.slots is not None and trained.slots > num_slots:
            raise InputError(f"the head in {path} has {num_slots} mask slots, got slots={trained.slots}")
        trained.check_target(checkpoint.target, layer.hidden_size, target)
        trained.check_vocabulary(layer.vocab_size, target)

        def head() -> "ParallelHead":
            form = str(config.get("form"))
            return cls(layer, target.embedding_and_head(), vocab_size=target.vocab_size, form=form, num_slots=num_slots)

        return build_module(head, checkpoint.tensors(), path)

    @classmethod
    def init_from(cls, place: TrainedHead, options: Any, context: HeadContext) -> "ParallelHead":
        if is_peagle(place.checkpoint.config, place.checkpoint.names):
            raise InputError(f"the head in {place.path} is a P-EAGLE head, and these are not trained further here")
        return cast(ParallelHead, super().init_from(place, options, context))

    def record(self, target: TargetShape, dtype: torch.dtype, name: str) -> HeadFiles:
        """`slots`, `fc` of the form `eagle`, and the layers under the names of a Llama's."""
        config = {
            "architectures": ["ParallelHead"],
            KIND: NAME,
            "form": self.form,
            "num_slots": self.num_slots,
            "layer": {**described(self.config), "vocab_size": target.vocab_size},
            "torch_dtype": str(dtype).removeprefix("torch."),
            TARGET: target.record(),
        }
        return config, self.state_dict()

    def exported(self, engine: str, target: TargetShape, dtype: torch.dtype, name: str) -> HeadFiles:
        """No engine reads it."""
        raise InputError(
            f"{engine} reads P-EAGLE heads, which have one vector for all mask slots, and no parallel heads that were "
            "trained here; the nearest is an EAGLE-3 head: outrider train eagle3"
        )

    def fuse(self, states: Float[Tensor, "*batch all"]) -> Float[Tensor, "*batch hidden"]:
        normed = self.embedding_and_head.norm(states)
        return normed.to(self.slots.device, self.slots.dtype)

    def forward(self, inputs: HeadInputs) -> Float[Tensor, "rows width hidden"]:
        tokens, read = inputs.tokens, inputs.needed_features
        if self.form == "eagle":
            read = torch.cat([self.embed(tokens.clamp_min(0), read), read], -1)
        if self.num_slots:
            masked = self.slots[(-1 - tokens).clamp_min(0)]
            read = torch.where(tokens[..., None] < 0, masked, read)
        hidden: Tensor = self.fc(read)
        rotary = self.rotary(hidden, inputs.positions)
        for layer in self.layers:
            hidden = layer(hidden, rotary, inputs)
        return hidden

    def logits(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch width"]:
        return self.target_logits(hidden)[..., : self.vocab_size]


class PEagleHead(Eagle3Head):
    r"""An EAGLE-3 head with mask slots behind its pairs. Every slot reads the embedding of the mask token. Its feature
    is made by `fuse` from $m$, which stands for the unknown states and is normed as real ones are. A negative token
    stands for a slot.

    Args:
        head: The EAGLE-3 head, whose tensors it takes.
        mask_id: The mask token.
        mask_hidden: $m$.
        num_slots: Mask slots of a draft.

    References:
        P-EAGLE 2026. https://arxiv.org/abs/2602.01469
    """

    def __init__(self, head: Eagle3Head, mask_id: int, mask_hidden: Float[Tensor, "1 1 all"], num_slots: int) -> None:
        super().__init__(head.sizes, head.embedding_and_head, head.ids)
        self.load_state_dict(head.state_dict(), assign=True)
        self.vocab_size, self.mask_id, self.num_slots = head.vocab_size, mask_id, num_slots
        self.mask_hidden = nn.Parameter(mask_hidden.to(head.fc.weight))

    @classmethod
    def load(cls, checkpoint: Checkpoint, target: TargetInfo, trained: TrainedHead) -> "PEagleHead":
        path, config = checkpoint.path, checkpoint.config
        hints = trained if isinstance(trained, TrainedParallel) else TrainedParallel(spec=SPEC, path=path)
        key = next((name for name in MASK_IDS if config.get(name) is not None), MASK_IDS[0])
        if config.get(key) is None and hints.mask_token_id is None:
            raise InputError(
                f"the config of the P-EAGLE head in {path} does not say which token stands for an unknown one; say it "
                f"with {MASK_IDS[0]}=..."
            )
        kept = {name.removeprefix("model."): tensor for name, tensor in checkpoint.tensors().items()}
        hidden = kept.pop(MASK, None)
        if hidden is None or hidden.dim() != 3 or not hidden.is_floating_point():
            raise InputError(f"the weights of the P-EAGLE head in {path} have no {MASK} of three dimensions")
        if config.get("speculators_model_type") == PEAGLE:
            config = {**config, "speculators_model_type": SPECULATORS}
        inner = Eagle3Head.load(replace(checkpoint, own_config=config, own_tensors=kept), target, trained)
        mask_id = size_in(config, key, path, default=hints.mask_token_id, least=0)
        if tuple(hidden.shape) != (1, 1, inner.fc.in_features) or mask_id >= inner.sizes.vocab_size:
            raise InputError(f"mask_hidden or mask_token_id of the P-EAGLE head in {path} does not fit it")
        num_slots = _num_slots(config, path) if hints.slots is None else hints.slots
        if num_slots is None:
            raise InputError(
                f"the config of the P-EAGLE head in {path} does not say how many tokens it drafts; add slots=N "
                "behind the path, one less than the tokens of a draft"
            )
        return cls(inner, mask_id, hidden, num_slots)

    def exported(self, engine: str, target: TargetShape, dtype: torch.dtype, name: str) -> HeadFiles:
        """In the layout of the authors of EAGLE-3: the conversion of the other layout forgets `fc_norm`."""
        config, tensors = self.native(target, dtype)
        return {**config, "pard_token": self.mask_id, TOKENS: self.num_slots + 1}, tensors

    def extra_repr(self) -> str:
        """The choices that no tensor shows."""
        return f"{super().extra_repr()}, mask_id={self.mask_id}"

    def forward(self, inputs: HeadInputs) -> Float[Tensor, "rows width hidden"]:
        slots = inputs.tokens < 0
        tokens = torch.where(slots, self.mask_id, inputs.tokens)
        features = torch.where(slots[..., None], self.fuse(self.mask_hidden), inputs.needed_features)
        return super().forward(replace(inputs, tokens=tokens, features=features))


@dataclass(kw_only=True)
class ParallelState(FeatureState):
    """One request's slot of a head, its pending features, and the last draft; changes in place.

    Attributes:
        block: Logits for the depths of the last draft; None before any.
    """

    block: Float[Tensor, "depth vocab"] | None = None


@dataclass(frozen=True, kw_only=True)
class ParallelDrafter(MarginalDrafter, FeatureDrafter[ParallelState]):
    """Guess with one forward per draft, over the pairs that the head has not read and the mask slots behind them.

    Keys and values of pairs stay in the head's cache. Those of slots do not.

    Attributes:
        slots: The tokens that stand for the slots, in order.

    References:
        ParallelSpec 2024. https://arxiv.org/abs/2410.05589
    """

    state: ClassVar[type[Any]] = ParallelState

    slots: tuple[int, ...]

    @classmethod
    def of(cls, head: FeatureHead, target: TargetInfo, trained: TrainedHead) -> "ParallelDrafter":
        """The drafter with a head, and with as many of its slots as the user wants."""
        wanted = trained.slots if isinstance(trained, TrainedParallel) else None
        count = cast(ParallelHead | PEagleHead, head).num_slots if wanted is None else wanted
        return cls(**cls.fields_of(head, target, trained), slots=tuple(range(-1, -1 - count, -1)))

    @property
    def max_depth(self) -> int:
        return len(self.slots) + 1

    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess:
        pairs = self._pairs(states, [self.state_of(state).num_pending for state in states], "last")
        slots = torch.tensor(self.slots, dtype=torch.long).to(self.lm.device, non_blocking=True)
        segments = [_before(pair, slots[: depth - 1]) for pair, depth in zip(pairs, depths, strict=True)]
        blocks = self.lm.extend(segments).logits.split(list(depths))
        self.lm.commit({pair.slot: range(len(pair.tokens)) for pair in pairs})
        for state, pair, block in zip(states, pairs, blocks, strict=True):
            drafter_state = self.state_of(state)
            drafter_state.forget(len(pair.tokens))
            drafter_state.block = block
        return Guess(logits=torch.stack([block[0] for block in blocks]), short_list=self.short_list)

    def guessed(self, state: Running) -> Float[Tensor, "depth vocab"] | None:
        return self.state_of(state).block

    def on_tables(self, vocab_size: int, seed: int) -> "ParallelDrafter":
        tables = super().on_tables(vocab_size, seed)
        slots = tuple(i % vocab_size for i in range(len(self.slots)))
        return replace(self, lm=tables.lm, reads=tables.reads, short_list=None, slots=slots)


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Where the groups of some rows stand, on the host.

    Attributes:
        at: The last place of the text that each group sees. A row with fewer groups than another is filled up with
            groups behind its end.
        real: Which groups count.
    """

    at: Int[Tensor, "rows groups"]
    real: Bool[Tensor, "rows groups"]


class ParallelObjective(FeatureObjective):
    r"""A parallel head learns from a target, group by group.

    A group is the mask slots $k = 1 \ldots K$ behind a place $t$, at the positions $t + k$. Slot k sees the text up to
    $t$, and the slots 1 to k of its own group. It learns the token that stands $k$ tokens behind $x_{t+2}$, which the
    place $t$ itself learns. Slots of one number run together, one pass after the other; the places of the text are the
    first pass.
    """

    head: ParallelHead
    options: ParallelOptions  # type: ignore[assignment]

    @property
    def num_guesses(self) -> int:
        """One guess at the last place of the text, and one at each slot."""
        return self.head.num_slots + 1

    def head_tokens(self, length: int) -> int:
        return length + self.head.num_slots * min(length, self.options.num_groups or length)

    def guess_rows(self, length: int) -> int:
        return self.head_tokens(length)

    @property
    def most_guesses(self) -> int:
        """One guess at the last place of the text, and one at each slot."""
        return self.num_guesses

    def guesses(self, batch: TrainBatch, count: int) -> Iterator[Float[Tensor, "rows length hidden"]]:
        """What the head returns at all places, then at slot 1, 2, ..., `count - 1` of each group; 0 without a group."""
        rows, length = batch.tokens.shape
        features = self.features(batch)
        if self.training and self.options.noise:
            features = features + self._noises(batch).to(features)
        places, cache = torch.arange(length, device=batch.tokens.device), GroupKeys()
        tokens = pad(batch.tokens[:, 1:], (0, 1), value=PADDING)
        sees = (places[:, None] >= places).expand(rows, 1, -1, -1)
        positions = places.expand(rows, -1)
        yield self.head(HeadInputs(tokens=tokens, features=features, positions=positions, mask=sees, cache=cache))
        at = on_device(self.groups(batch).at.numpy(), batch.tokens.device)
        nothing = features.new_zeros(*at.shape, features.shape[-1])
        seen = (places <= at[..., None])[:, None]
        eye = torch.eye(at.shape[1], dtype=torch.bool, device=at.device).expand(rows, 1, -1, -1)
        for number in range(1, count):
            seen = torch.cat([seen, eye], -1)
            slots, positions = torch.full_like(at, -number), at + number
            output = self.head(HeadInputs(tokens=slots, features=nothing, positions=positions, mask=seen, cache=cache))
            whole = output.new_zeros(rows, length + 1, output.shape[-1])
            yield whole.scatter(1, at[..., None].expand_as(output), output)[:, :length]

    def groups(self, batch: TrainBatch) -> Groups:
        """The groups of a step: some of the places whose next guess is learnt, or all places."""
        rows, length = batch.tokens.shape
        if self.options.num_groups is None or not self.training:
            every = torch.arange(length).repeat(rows, 1)
            return Groups(at=every, real=torch.ones_like(every, dtype=torch.bool))
        drawn = []
        for learnt, number in zip(batch.host.learnt, batch.rows, strict=True):
            places = np.flatnonzero(learnt[2:])
            dice = step_generator(Purpose.GROUPS, seed=self.context.seed, step=batch.step, row=number)
            drawn.append(np.sort(dice.permutation(places)[: self.options.num_groups]))
        most = max(1, *(len(each) for each in drawn))
        at = np.stack([np.pad(each, (0, most - len(each)), constant_values=length) for each in drawn])
        starts = torch.from_numpy(at)
        return Groups(at=starts, real=starts < length)

    def places(self, batch: TrainBatch, number: int) -> LearntPositions:
        """All places for the first guess, and those of the groups for the others."""
        if not number:
            return super().places(batch, number)
        (rows, at), groups = learnt_places(batch, number), self.groups(batch).at.numpy()
        # The last column is for groups that do not count.
        grouped = np.zeros((len(groups), batch.tokens.shape[1] + 1), dtype=bool)
        np.put_along_axis(grouped, groups, True, axis=1)
        kept = grouped[rows, at]
        device = batch.tokens.device
        return LearntPositions.at_places(batch, number, on_device(rows[kept], device), on_device(at[kept], device))

    def places_of(self, documents: Sequence[Document], max_length: int) -> Float[Tensor, " guesses"]:
        """As of every head; of the slots of groups that are drawn, as many as there are on average."""
        if self.options.num_groups is None:
            return super().places_of(documents, max_length)
        slots, total = torch.arange(self.num_guesses), torch.zeros(self.num_guesses, dtype=torch.float64)
        for document in documents:
            first = super().places_of([document], max_length)[0]
            # Groups begin where the first guess is learnt, and their last ones reach behind the text.
            drawn = (self.options.num_groups / first.clamp(min=1)).clamp(max=1)
            total += torch.where(slots > 0, drawn, 1.0) * (first - slots).clamp(min=0)
        return total


@dataclass(frozen=True, kw_only=True)
class TrainedParallel(TrainedEagle3):
    """A parallel head on disk. P-EAGLE heads are such heads too.

    Attributes:
        slots: Mask slots of a P-EAGLE head, which guess one token each behind the first; by default as its config says.
        mask_token_id: The mask token of a P-EAGLE head, where its config does not say it. `norm_before_residual`,
            `norm_output` and `taps` are for such heads too, as for `eagle3`.
    """

    slots: int | None = None
    mask_token_id: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slots is not None and not 0 <= self.slots <= MOST_COUNT:
            raise InputError(f"slots must be in 0..{MOST_COUNT}, got {self.slots}")


def published(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether a checkpoint is a parallel head of ours, or one of P-EAGLE."""
    return is_ours(config) or is_peagle(config, names)


def is_ours(config: Mapping[str, Any]) -> bool:
    """Whether a config is that of a parallel head of ours."""
    return config.get(KIND) == NAME


def is_peagle(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether a checkpoint is one of P-EAGLE."""
    if KIND in config:
        return False
    return config.get("speculators_model_type") == PEAGLE or any(name.removeprefix("model.") == MASK for name in names)


def _num_slots(config: Mapping[str, Any], path: str) -> int | None:
    """One slot less than the draft has tokens, because the last pair guesses the first; None if no config says it."""
    if config.get(TOKENS) is not None:
        return size_in(config, TOKENS, path, most=MOST_COUNT) - 1
    try:
        method = config["speculators_config"]["proposal_methods"][0]
        method["speculative_tokens"]
    except (KeyError, IndexError, TypeError):
        if config.get(DEPTHS) is None:
            return None
        return size_in(config, DEPTHS, path, most=MOST_COUNT) - 1
    return size_in(method, "speculative_tokens", path, most=MOST_COUNT) - 1


def _before(pairs: Segment, slots: Tensor) -> Segment:
    """A segment with mask slots behind its pairs. The logits are those of the last pair and of the slots."""
    if pairs.features is None:
        raise TypeError("a pair has a feature")
    nothing = pairs.features.new_zeros(len(slots), pairs.features.shape[1])
    return replace(
        pairs,
        tokens=torch.cat([pairs.tokens, slots]),
        features=torch.cat([pairs.features, nothing]),
        logits=len(slots) + 1,
    )


SPEC = HeadSpec(
    name=NAME,
    head=ParallelHead,
    drafter=ParallelDrafter,
    published=published,
    trained=TrainedParallel,
    options=ParallelOptions,
    objective=ParallelObjective,
    exports=Exports(vllm="eagle3", draws=False, options={"parallel_drafting": True}, instead="eagle3"),
)
