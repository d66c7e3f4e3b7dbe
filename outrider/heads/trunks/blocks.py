r"""Heads that guess a whole block of tokens in one forward (DFlash and its variants): the module, the drafter, the
objective.

DFlash 2026, https://arxiv.org/abs/2602.06036
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from reprlib import repr as short
from typing import Any, ClassVar, TypeVar, cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, embedding
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, Qwen3Config

from outrider.core.dice import Purpose, step_generator
from outrider.core.types import Guess, InputError, Request, Running, ShortList
from outrider.drafters.marginal import MarginalDrafter
from outrider.drafters.protocol import Observed
from outrider.drafters.slotted import SlotState, SlottedDrafter
from outrider.heads.doubt import Doubt, other_taps
from outrider.heads.head import Head, HeadFiles, TrainedHead
from outrider.heads.objective import HeadContext, HeadObjective
from outrider.heads.parts.block_config import AttentionSpan, BlockConfig, CheckpointHints
from outrider.heads.parts.block_layouts import (
    architecture_of,
    authors_config,
    check_keys,
    for_engines,
    inner_of,
    kind_of,
    named_in,
    read_sizes,
    speculators_config,
)
from outrider.heads.parts.layer_config import rotary_doubts
from outrider.heads.parts.layers import Attention, GatedMLP, Rotary
from outrider.learning.attention import GroupKeys
from outrider.learning.batch import Document, TrainBatch, on_device
from outrider.learning.block_loss import BlockLoss, usual_gamma
from outrider.learning.divergences import Divergence, among_likeliest, chunked, cross_entropy, divergence
from outrider.learning.learner import JudgedDrafts, Loss
from outrider.learning.options import HeadOptions, loss, size
from outrider.learning.target_rows import rows_at
from outrider.learning.top_rows import TopRows
from outrider.lm.forwards.compilable import ForwardKind
from outrider.lm.head import HeadLM, sees_all
from outrider.lm.hf.anatomy import rotary_parameters
from outrider.lm.hf.checkpoint import TARGET, Checkpoint, TargetShape, build_module
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead
from outrider.lm.protocol import Extension, Segment
from outrider.lm.slots.batch import upload
from outrider.lm.slots.head_inputs import HeadInputs
from outrider.lm.tabular import TabularLM, random_rows
from outrider.lm.target_info import TargetInfo

TABLE_BLOCK = 5
"""Positions of a block in proofs on tables."""
UNUSED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
"""Tensors that the files of all heads may have and that none of them needs."""
CONFIDENCE = ("confidence_head.proj.weight", "confidence_head.proj.bias")
"""The tensors of a confidence head, which some files have and few heads need."""
JUDGED_AT_ONCE = 32
"""Blocks of a text that are judged in one forward."""
DISTANCE = divergence("tvd")
"""How far rows are from each other: the chance that token verification rejects."""
RowsOfBoth = Callable[[slice, Float[Tensor, "rows vocab"]], tuple[Tensor, Tensor]]
"""Takes the head's logits of some guesses. Returns the target's row and the head's for each."""
LossOfRows = Callable[[slice, Float[Tensor, "rows vocab"]], Float[Tensor, " rows"]]
"""Takes which guesses, and their logits. Returns the loss of each."""


@dataclass(frozen=True, kw_only=True)
class BlockOptions(HeadOptions):
    """What a head that guesses blocks can be told.

    Attributes:
        layers: Decoder layers. By default 5, and 7 of dflare.
        block_size: Positions of a block, the anchor's included. By default 8, and 7 of dspark. A block guesses one
            token less than it has positions, or with dspark as many.
        taps: The target's hidden states that are read, such as 2x10x18; by default 5, and 9 of dflare, at even
            distances.
        mask_token_id: The token that stands for an unknown one; by default one that texts do not have.
        num_anchors: Most anchors of a text, drawn anew each time it comes. Each has a block of its own.
        gamma: A guess at depth k counts exp(-(k - 1) / gamma); by default 7 for blocks of 16, 5 for 10, 4 for 8.
        weighting: How much a guess counts: decay, by its depth; even, all the same; or survival, by how likely the
            guesses before it are accepted (D-PACE).
        hard: Share of the cross-entropy of the text's own tokens beside the divergence.
    """

    layers: int = size(5, least=1)
    block_size: int = size(8, least=2)
    taps: tuple[int, ...] | None = size(None)
    mask_token_id: int | None = size(None, least=0)
    num_anchors: int = loss(64, least=1)
    gamma: float | None = loss(None)
    weighting: str = loss("decay")
    hard: float = loss(0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.block_loss(None, self.block_size)

    def block_loss(self, of: Divergence | None, block_size: int) -> BlockLoss:
        """What is minimised. Raises InputError if a number is out of range.

        Args:
            of: As in `BlockLoss`.
            block_size: Positions of a block of the head.
        """
        gamma = usual_gamma(block_size) if self.gamma is None else self.gamma
        return BlockLoss(of=of, hard=self.hard, gamma=gamma, weighting=self.weighting)


def spread_taps(num_layers: int, count: int) -> tuple[int, ...]:
    r"""Hidden states at even distances: the outputs of layers $1 + i (L - 4) / (n - 1)$, rounded. Fewer where these
    are the same.

    Tap k enters layer k, so the output of layer k is tap k + 1.

    Example:
        >>> spread_taps(36, 5), spread_taps(36, 9), spread_taps(2, 5)
        ((2, 10, 18, 26, 34), (2, 6, 10, 14, 18, 22, 26, 30, 34), (1,))
    """
    places = [1 + i * (num_layers - 4) / max(1, count - 1) for i in range(count)] if count > 1 else [num_layers / 2]
    return tuple(sorted({min(max(1, round(place) + 1), max(1, num_layers - 1)) for place in places}))


class BlockLayer(nn.Module):
    """A decoder layer of Qwen 3 over the positions of a block, which see each other and the context.

    The keys and values of a context position are made of the target's features there.
    """

    def __init__(self, config: PreTrainedConfig, number: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = self.attention(config, number)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)

    def attention(self, config: PreTrainedConfig, number: int) -> Attention:
        """Its attention, with random weights."""
        return Attention(config, number, normed=True)

    def forward(
        self, states: Float[Tensor, "rows width hidden"], rotary: Float[Tensor, "2 rows width dim"], inputs: HeadInputs
    ) -> Float[Tensor, "rows width hidden"]:
        states = states + self.self_attn(self.input_layernorm(states), rotary, inputs)
        return states + self.mlp(self.post_attention_layernorm(states))


class BlockHead(Head):
    r"""A head that reads a block of the anchor and masks, and sees the target's features of all positions before it.

    With the tapped states $o_1 \ldots o_n$ of a position, `contexts` makes what the keys and values of each layer are
    made of. The features do not pass through the layers. The target's embedding and output layer are used, unless the
    checkpoint has its own.

    A target's embedding counts without the factor by which some targets scale it. Its output layer counts with scales
    and caps.

    What a head's files are like stands on its class: the attributes from `name` on, and `published`, `read_config`,
    `rename`, `written_keys` and `written_inner`, each of which a head can extend.

    Attributes:
        feature_size: Width of the tapped states side by side.
        vocab_size: Width of the logits.
        num_taps: How many hidden states a new head reads by default.
        name: Its name in the catalog, and in the layout of speculators.
        architectures: Its architectures in its authors' files; the first one is written.
        speculators: Its architecture in the layout of speculators; None: it is not written in that.
        speculators_for: The engines that get that layout.
        keys: The keys of `dflash_config` that it has beside those of all heads.
        projectors: The values of `projector_type` that name it.
        unused: The tensors that its files may have and that it does not need.
        anchor_guesses: Whether the anchor's position guesses the first token where a file does not say it. Other
            engines take it for granted. None: files differ, and engines read both.

    Args:
        config: The sizes.
        embedding_and_head: Those of the target.
        vocab_size: Width of the target's logits.

    References:
        DFlash 2026. https://arxiv.org/abs/2602.06036
    """

    num_taps: ClassVar[int] = 5
    kinds: ClassVar[Sequence[ForwardKind]] = (ForwardKind(logits=False), ForwardKind(features=False))

    name: ClassVar[str]
    architectures: ClassVar[Sequence[str]]
    speculators: ClassVar[str | None] = None
    speculators_for: ClassVar[Collection[str]] = ("vllm",)
    keys: ClassVar[Collection[str]] = ()
    projectors: ClassVar[Collection[str]] = ()
    unused: ClassVar[Collection[str]] = (*UNUSED, *CONFIDENCE)
    anchor_guesses: ClassVar[bool | None] = False

    def __init__(self, config: BlockConfig, embedding_and_head: EmbeddingAndHead, vocab_size: int) -> None:
        super().__init__()
        size, eps = config.layers.hidden_size, config.layers.rms_norm_eps
        self.config, self.embedding_and_head = config, embedding_and_head
        self.feature_size = len(config.taps) * config.target_size
        self.vocab_size = vocab_size if config.num_outputs is None else config.num_outputs
        if not config.listed:
            self.vocab_size = min(self.vocab_size, vocab_size)
        count = config.layers.num_hidden_layers
        self.layers = nn.ModuleList(self.layer(config, i) for i in range(count))
        self.norm = nn.RMSNorm(size, eps=eps)
        self.rotary = Rotary(config.layers)
        if config.num_embeddings is not None:
            self.embed_tokens = nn.Embedding(config.num_embeddings, size)
        if config.num_outputs is not None:
            self.lm_head = nn.Linear(size, config.num_outputs, bias=False)
        if config.listed:
            self.register_buffer("d2t", torch.zeros(config.num_outputs or 0, dtype=torch.long))

    @classmethod
    def published(cls, config: Mapping[str, Any], names: Collection[str]) -> bool:
        """Whether a checkpoint is a head of this kind.

        Args:
            config: Its config file.
            names: Its tensors.
        """
        if (kind := kind_of(config)) is not None:
            return bool(kind == cls.name)
        return inner_of(config).get("projector_type") in cls.projectors or architecture_of(config) in cls.architectures

    @classmethod
    def read_config(cls, config: Mapping[str, Any], path: str, hints: CheckpointHints) -> BlockConfig:
        """The sizes that a config file says.

        Args:
            path: Where it lies, for messages.

        Raises:
            InputError: A size is missing or makes no sense, or the file leaves open what only the user can say.
        """
        check_keys(config, path, cls.name, cls.keys, cls.projectors)
        return read_sizes(config, path, hints, from_anchor=cls.anchor_guesses)

    @classmethod
    def rename(cls, tensors: Mapping[str, Tensor], config: BlockConfig) -> dict[str, Tensor]:
        """The tensors of a file under the head's own names, without those that it does not need."""
        bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        return {name: each for name, each in bare.items() if name not in cls.unused and not name.endswith("inv_freq")}

    @classmethod
    def sized(cls, config: BlockConfig, tensors: Mapping[str, Tensor]) -> BlockConfig:
        """The sizes with those that tensors under the head's names show."""
        output, table = tensors.get("lm_head.weight"), tensors.get("embed_tokens.weight")
        return replace(
            config,
            num_outputs=None if output is None else len(output),
            num_embeddings=None if table is None else len(table),
            listed="d2t" in tensors,
        )

    def written_keys(self) -> dict[str, Any]:
        """What a config file of either layout says of this head alone."""
        return {}

    def written_inner(self) -> dict[str, Any]:
        """What `dflash_config` says of this head alone."""
        return {"sample_from_anchor": True} if self.config.from_anchor else {}

    def in_speculators(self, target: str) -> dict[str, Any]:
        """The config file in the layout of speculators, for a target of this name."""
        return speculators_config(self.config, self.name, cast(str, self.speculators), self.written_keys(), target)

    def in_authors(self, target: TargetShape) -> dict[str, Any]:
        """The config file in the layout of its authors."""
        architecture, inner = self.architectures[0], self.written_inner()
        return {**authors_config(self.config, architecture, inner, target.num_layers), **self.written_keys()}

    def layer(self, config: BlockConfig, number: int) -> BlockLayer:
        """A decoder layer, with random weights."""
        return BlockLayer(config.layers, number)

    @classmethod
    def new(cls, options: BlockOptions, context: HeadContext) -> "BlockHead":
        """A new head, with layers as wide as the target's."""
        info, embedding_and_head = context.info, context.info.embedding_and_head()
        mask_id = options.mask_token_id
        mask_id = unknown_token(context.target, context.tokenizer) if mask_id is None else mask_id
        known = context.target.get_input_embeddings().weight.shape[0]
        if not 0 <= mask_id < known:
            raise InputError(f"mask_token_id must be in 0..{known - 1}, the target's tokens, got {mask_id}")
        config = BlockConfig(
            layers=layers_like(context.anatomy.text, options.layers, max(known, info.vocab_size)),
            block_size=options.block_size,
            mask_id=mask_id,
            taps=spread_taps(info.num_layers, cls.num_taps) if options.taps is None else tuple(options.taps),
            target_size=info.hidden_size,
            **cls.sizes(options),
        )
        head = cls(config, embedding_and_head, info.vocab_size)
        head.check_depth(context.depth)
        head.draw()
        return head

    @classmethod
    def load(cls, checkpoint: Checkpoint, target: TargetInfo, trained: TrainedHead) -> "BlockHead":
        path, hints = checkpoint.path, trained if isinstance(trained, CheckpointHints) else CheckpointHints()
        if not cls.published(checkpoint.config, checkpoint.names):
            raise InputError(
                f"the head in {path} is no {cls.name} head: its config names {short(named_in(checkpoint.config))}; "
                "give its path alone, and its files choose the drafter"
            )
        try:
            config = cls.read_config(checkpoint.config, path, hints)
        except (AttributeError, KeyError, TypeError) as error:
            raise InputError(f"config.json of {path} does not describe a {cls.name} head: {short(error)}") from error
        trained.check_target(checkpoint.target, config.target_size, target)
        if max(config.taps) > target.num_layers:
            raise InputError(
                f"the head in {path} reads the hidden states {list(config.taps)}, and this target has "
                f"{target.num_layers} layers; give a head that was trained for this target"
            )
        tensors = cls.rename(checkpoint.tensors(), config)
        output, listed = tensors.get("lm_head.weight"), tensors.get("d2t")
        if listed is not None and (output is None or (len(output) >= target.vocab_size and not listed.any())):
            # All tokens, at their own places.
            del tensors["d2t"]
        config = cls.sized(config, tensors)
        _check_vocabulary(config, tensors, path, target.vocab_size)
        borrowed = config.num_embeddings is None or config.num_outputs is None
        if borrowed and config.layers.hidden_size != target.hidden_size:
            raise InputError(
                f"the head in {path} is {config.layers.hidden_size} wide and uses the embedding or the output "
                f"layer of its target, and this target's are {target.hidden_size} wide"
            )
        embedding_and_head = target.embedding_and_head()
        return build_module(lambda: cls(config, embedding_and_head, target.vocab_size), tensors, path)

    @classmethod
    def init_from(cls, place: TrainedHead, options: Any, context: HeadContext) -> "BlockHead":
        head: Any = super().init_from(place, options, context)
        if head.config.num_outputs is not None:
            raise InputError(
                f"the head in {place.path} has an output layer of its own, and only heads that use their target's can "
                "be trained further"
            )
        head.check_depth(context.depth)
        return head

    @classmethod
    def sizes(cls, options: Any) -> dict[str, Any]:
        """What the config of a new head says beside what all heads on this trunk say."""
        return {}

    def draw(self) -> None:
        """Draw the weights of a new head."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                # As large as trained ones: with smaller ones the mask's own embedding drowns what layers add to it.
                nn.init.normal_(module.weight, std=module.in_features**-0.5)

    @abstractmethod
    def contexts(self, features: Float[Tensor, "*batch dim"]) -> Sequence[Float[Tensor, "*batch hidden"]]:
        """For each layer, what the keys and values of context positions are made of."""

    def reads(self, num_layers: int) -> tuple[int, ...]:
        return self.config.taps

    def doubts(self, target: TargetInfo) -> Sequence[Doubt]:
        config = self.config
        doubts = rotary_doubts(self, config.layers, target.config)
        for taps, how in other_taps(config.taps, target.num_layers):
            doubts.append(
                Doubt(
                    about="taps",
                    means=f"it reads the hidden states {', '.join(map(str, config.taps))}, and was trained on others, "
                    f"{how}",
                    advice=f"let its config name the hidden states {', '.join(map(str, taps))}, where k enters layer k",
                    changes=[(self, "config", replace(config, taps=taps))],
                )
            )
        tokens = target.tokenizer
        ids = () if tokens is None else (tokens.mask_token_id, tokens.pad_token_id, tokens.unk_token_id)
        for mask in sorted({each for each in (*ids, 0) if each is not None and each != config.mask_id}):
            doubts.append(
                Doubt(
                    about="mask token",
                    means=f"its mask token is {config.mask_id}, and was trained as {mask}",
                    advice=f"write mask_token_id {mask} into its config",
                    changes=[(self, "config", replace(config, mask_id=mask))],
                )
            )
        causal = config.causal == {True}
        other = () if causal else (AttentionSpan(causal=True),) * config.layers.num_hidden_layers
        doubts.append(
            Doubt(
                about="causality",
                means=f"its blocks were trained {'seeing both ways' if causal else 'causally'}",
                advice=f"say causal={str(not causal).lower()} behind its path, and take the other word from its config",
                changes=[(self, "config", replace(config, sights=other))],
            )
        )
        return doubts

    def freeze(self) -> None:
        if self.config.num_embeddings is not None:
            self.embed_tokens.requires_grad_(False)

    def record(self, target: TargetShape, dtype: torch.dtype, name: str) -> HeadFiles:
        """In the layout of speculators, which has no causal layers without a window, or in that of its authors."""
        windowed = not any(span.causal and span.window is None for span in self.config.sights)
        config = self.in_speculators(name) if self.speculators and windowed else self.in_authors(target)
        return self._labelled(config, target, dtype)

    def exported(self, engine: str, target: TargetShape, dtype: torch.dtype, name: str) -> HeadFiles:
        """vLLM gets the layout of speculators where that can describe the head. There one key says whether windows are
        causal, and vLLM takes it for layers without windows too. So a head with causal layers is written in its
        authors' layout.
        """
        config, train = self.config, f"train one: outrider train {self.name}"
        if engine == "vllm" and config.from_anchor and self.anchor_guesses is False:
            raise InputError(
                f"vllm reads {self.name} heads whose first mask guesses the first token, and in this one the anchor's "
                f"position does; {train}"
            )
        if engine == "llama.cpp" and (config.num_outputs is not None or config.num_embeddings is not None):
            raise InputError(
                f"llama.cpp reads {self.name} heads that use the target's embedding and output layer, and this one has "
                f"its own; {train}"
            )
        if engine != "vllm" and any(span != AttentionSpan() for span in config.sights):
            raise InputError(
                f"{engine} reads {self.name} heads whose positions see all of the context and of their block, and this "
                f"one has windows or causal layers; vllm reads it, or {train}"
            )
        if engine in self.speculators_for and self.speculators and True not in config.causal:
            return self._labelled(self.in_speculators(name), target, dtype)
        written = for_engines(self.in_authors(target), config, target.num_layers)
        return self._labelled(written, target, dtype)

    def _labelled(self, config: dict[str, Any], target: TargetShape, dtype: torch.dtype) -> HeadFiles:
        """A config file that says its dtype and its target, and the tensors."""
        labels = {TARGET: target.record(), "torch_dtype": str(dtype).removeprefix("torch.")}
        return {**config, **labels}, self.state_dict()

    @property
    def ids(self) -> Int[Tensor, " width"] | None:
        """The tokens that it can guess, ascending; None: all."""
        if not self.config.listed:
            return None
        offsets = self.get_buffer("d2t")
        return torch.arange(len(offsets), device=offsets.device) + offsets

    def check_depth(self, depth: int) -> None:
        """Raise InputError if a block guesses fewer tokens."""
        if depth > self.config.max_depth:
            raise InputError(
                f"a block of {self.config.block_size} guesses {self.config.max_depth} tokens, and depth is {depth}; "
                "give a smaller depth or a larger block size"
            )

    def extra_repr(self) -> str:
        """The choices that no tensor shows."""
        choices = ("block_size", "mask_id", "taps", "from_anchor", "unused_positions", "sights", "embedding_scale")
        return ", ".join(f"{name}={getattr(self.config, name)}" for name in (*choices, "extra"))

    def forward(self, inputs: HeadInputs) -> Float[Tensor, "rows width hidden"]:
        """Features of context positions are remembered, whatever the tokens there. Without features, the nodes are a
        block: its output features are those below the output layer.
        """
        if inputs.features is None:
            return self.block(inputs)
        contexts = self.contexts(inputs.features)
        rotary = self.rotary(contexts[0], inputs.positions)
        for layer, context in zip(self._layers(), contexts, strict=True):
            layer.self_attn.keep(context, rotary, inputs.cache)
        return contexts[-1]

    def block(
        self, inputs: HeadInputs, places: Int[Tensor, "rows keys"] | None = None
    ) -> Float[Tensor, "rows width hidden"]:
        """Output features of blocks.

        Args:
            places: Position of each key; None: keys stand in the order of their positions, without gaps.
        """
        states, mask = self.embed(inputs.tokens), inputs.mask
        rotary = self.rotary(states, inputs.positions)
        for i, layer in enumerate(self._layers()):
            seen = inputs
            if self.config.sights and self.config.sights[i] != AttentionSpan():
                keys = torch.arange(mask.shape[-1], device=mask.device)[None] if places is None else places
                seen = replace(inputs, mask=mask & _within(self.config.sights[i], inputs.positions, keys)[:, None])
            states = layer(states, rotary, seen)
        return self.norm(states)

    def embed(self, tokens: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch hidden"]:
        """Input embeddings in the head's own dtype."""
        table = self.embed_tokens.weight if self.config.num_embeddings is not None else _table(self.embedding_and_head)
        embedded = self.embedding_and_head.embed(tokens) if table is None else embedding(tokens, table)
        return embedded.to(self.norm.weight.dtype) * self.config.embedding_scale

    def logits(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch vocab"]:
        if self.config.num_outputs is not None:
            return self.lm_head(hidden)
        if not hidden.numel():
            return hidden.new_zeros(*hidden.shape[:-1], self.vocab_size)
        table = _table(self.embedding_and_head)
        return self.embedding_and_head.head(hidden if table is None else hidden.to(table.device, table.dtype))

    def guess_features(
        self, hidden: Float[Tensor, "*batch block hidden"], before: Int[np.ndarray, "*batch"]
    ) -> Float[Tensor, "*batch block features"]:
        """What guesses are corrected by at each position of blocks: the output features, and what else a head needs.

        Args:
            hidden: Output features of all positions.
            before: The token before each anchor, on the host; the anchor itself at the start of a text.
        """
        return hidden

    def states_given_previous(
        self, hidden: Float[Tensor, "*batch depth features"], before: Int[Tensor, "*batch depth"]
    ) -> Float[Tensor, "*batch depth inner"]:
        """What `logits_given_previous` reads, where the tokens before each guess are known: in training.

        Args:
            hidden: What `guess_features` returns of the positions that guess, in order.
            before: The token before each guessed one; the anchor first.
        """
        return hidden

    def logits_given_previous(self, inner: Float[Tensor, "*batch inner"]) -> Float[Tensor, "*batch vocab"]:
        """Logits of guesses whose tokens before them are known."""
        return self.logits(inner)

    def confidence(self, inner: Float[Tensor, "*batch inner"]) -> Float[Tensor, "*batch"] | None:
        """The logits of the probabilities that guesses are accepted, from what `logits_given_previous` reads; None
        where it estimates none.
        """
        return None

    def _layers(self) -> list[BlockLayer]:
        return [layer for layer in self.layers if isinstance(layer, BlockLayer)]


class FusedBlockHead(BlockHead):
    r"""A head whose context has the feature $c = \mathrm{RMSNorm}(W_{fc} [o_1; \ldots; o_n])$ at each position.

    Every layer makes its keys and values of $c$ with the projections that it also has for the block.
    """

    def __init__(self, config: BlockConfig, embedding_and_head: EmbeddingAndHead, vocab_size: int) -> None:
        super().__init__(config, embedding_and_head, vocab_size)
        self.fc = nn.Linear(self.feature_size, config.layers.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.layers.hidden_size, eps=config.layers.rms_norm_eps)

    def contexts(self, features: Float[Tensor, "*batch dim"]) -> Sequence[Float[Tensor, "*batch hidden"]]:
        return [self.hidden_norm(self.fc(features))] * len(self.layers)


def _check_vocabulary(config: BlockConfig, tensors: Mapping[str, Tensor], path: str, vocab_size: int) -> None:
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


def _within(
    sight: AttentionSpan, queries: Int[Tensor, "rows width"], keys: Int[Tensor, "#rows keys"]
) -> Bool[Tensor, "rows width keys"]:
    """The keys that a layer's sight allows, by their positions."""
    ahead = keys[:, None, :] - queries[:, :, None]
    seen = ahead <= 0 if sight.causal else torch.ones_like(ahead, dtype=torch.bool)
    return seen if sight.window is None else seen & (ahead.abs() < sight.window)


def _table(embedding_and_head: EmbeddingAndHead) -> Tensor | None:
    """The weights of the target's embedding; None where it has no such table."""
    table = getattr(embedding_and_head.embed, "weight", None)
    return table if isinstance(table, Tensor) and table.is_floating_point() else None


def layers_like(text: PreTrainedConfig, num_layers: int, vocab_size: int) -> PreTrainedConfig:
    """The config of decoder layers that are as wide as a target's.

    Args:
        text: The target's text config.
        vocab_size: Rows of the target's embedding.
    """
    heads = getattr(text, "num_attention_heads", None) or max(1, text.hidden_size // 64)
    inner = getattr(text, "intermediate_size", None)
    rotary: dict[str, Any] = next(iter(rotary_parameters(text)), {})
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=inner if isinstance(inner, int) else 4 * text.hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        rms_norm_eps=getattr(text, "rms_norm_eps", None) or 1e-6,
        max_position_embeddings=getattr(text, "max_position_embeddings", None) or 1 << 15,
        rope_parameters={"rope_type": "default", "rope_theta": float(rotary.get("rope_theta") or 10000.0)},
        tie_word_embeddings=False,
    )


def unknown_token(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> int:
    """A token that can stand for an unknown one: the tokenizer's mask, else one behind its last, else its padding or
    its unknown token, else token 0.
    """
    if tokenizer is None:
        return 0
    if tokenizer.mask_token_id is not None:
        return int(tokenizer.mask_token_id)
    behind = max(tokenizer.get_vocab().values()) + 1
    if behind < target.get_input_embeddings().weight.shape[0]:
        return behind
    return next((int(i) for i in (tokenizer.pad_token_id, tokenizer.unk_token_id) if i is not None), 0)


@dataclass(kw_only=True)
class BlockState(SlotState):
    """One request's slot of a head, and the block that it guessed last; changes in place.

    The slot holds keys and values for every position before the anchor.

    Attributes:
        block: Logits for the positions behind the anchor, in order.
    """

    block: Float[Tensor, "depth vocab"] | None = None


Blocks = TypeVar("Blocks", bound=BlockState)


@dataclass(frozen=True, kw_only=True)
class BlockDrafter(MarginalDrafter, SlottedDrafter[Blocks]):
    """Guess all tokens behind the anchor at once: one row per position, independent of the other guesses.

    The head reads the target's features of all positions before the anchor, and caches its keys and values for them.
    For a draft it reads a block behind them: the anchor, and one mask token per further position. All positions of the
    block see each other.

    Attributes:
        lm: The head; a table in proofs.
        reads: The target's hidden states that it reads, in order.
        block_size: Positions of a block, the anchor's included.
        mask_id: The token that stands for an unknown token.
        from_anchor: Whether the anchor's position guesses the first token; otherwise the first mask's position does.
        unused_positions: How many positions at the end of a block guess nothing.

    References:
        DFlash 2026. https://arxiv.org/abs/2602.06036
    """

    state: ClassVar[type[Any]] = BlockState

    lm: HeadLM | TabularLM
    reads: tuple[int, ...]
    block_size: int
    mask_id: int
    from_anchor: bool = False
    unused_positions: int = 0

    @classmethod
    def of(cls, head: BlockHead, target: TargetInfo, trained: TrainedHead) -> "BlockDrafter":
        """The drafter with a head, where the user wants it."""
        config, ids = head.config, head.ids
        return cls(
            lm=trained.lm(head, target, more=config.block_size),
            reads=config.taps,
            block_size=config.block_size,
            mask_id=config.mask_id,
            from_anchor=config.from_anchor,
            unused_positions=config.unused_positions,
            short_list=None if ids is None else ShortList.of(ids.to(target.device), target.vocab_size),
        )

    @property
    def taps(self) -> tuple[int, ...]:
        return self.reads

    @property
    def max_context(self) -> int | None:
        return self.lm.max_context - self.block_size

    @property
    def max_depth(self) -> int:
        return self.block_size - self.unused_positions - (0 if self.from_anchor else 1)

    def open(self, request: Request) -> Blocks:
        return self.state(slot=self.lm.open())

    def observe(self, states: Sequence[Running], observed: Observed) -> None:
        """Run the head on the new features. Its cache of a position does not depend on the token there."""
        features = torch.cat([observed.taps[tap] for tap in self.reads], -1).to(self.lm.device, non_blocking=True)
        [tokens], segments = upload([observed.tokens], self.lm.device), []
        for i, state in enumerate(states):
            slot, first, end = self.state_of(state).slot, int(observed.offsets[i]), int(observed.offsets[i + 1])
            end = min(end, first + self.lm.max_context - self.lm.length(slot))
            segments.append(Segment(slot=slot, tokens=tokens[first:end], features=features[first:end], logits="none"))
        self.lm.extend(segments)
        self.lm.commit({segment.slot: range(len(segment.tokens)) for segment in segments})

    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess:
        blocks = self.run_block(states, depths).logits.split(list(depths))
        for state, block in zip(states, blocks, strict=True):
            self.state_of(state).block = block
        return Guess(logits=torch.stack([block[0] for block in blocks]), short_list=self.short_list)

    def run_block(self, states: Sequence[Running], depths: Sequence[int]) -> Extension:
        """Run the head on a block behind each request; nothing of it stays in the cache. The logits are those of the
        first `depths[i]` guesses.
        """
        size, first = self.block_size, 0 if self.from_anchor else 1
        tokens = torch.full((len(states), size), self.mask_id)
        tokens[:, 0] = torch.tensor([state.tokens[-1] for state in states])
        rows, sight = tokens.to(self.lm.device, non_blocking=True), sees_all(size)
        segments = [
            Segment(slot=self.state_of(state).slot, tokens=row, logits=range(first, first + depth), sees=sight)
            for state, row, depth in zip(states, rows, depths, strict=True)
        ]
        extension = self.lm.extend(segments)
        self.lm.commit({segment.slot: [] for segment in segments})
        return extension

    def guessed(self, state: Running) -> Float[Tensor, "depth vocab"] | None:
        return self.state_of(state).block

    def needs(self, state: object, length: int) -> int:
        return min(self.lm.length(self.checked(state).slot), length)

    def reuse(self, state: object, request: Request, length: int) -> Blocks:
        drafter_state = self.checked(state)
        self.lm.truncate(drafter_state.slot, self.needs(state, length))
        return self.state(slot=drafter_state.slot)

    def fork(self, state: object, request: Request, length: int) -> Blocks:
        return self.state(slot=self.lm.copy(self.checked(state).slot, self.needs(state, length)))

    def cast(self, target_info: TargetInfo) -> "BlockDrafter":
        return replace(self, lm=self.lm.cast(target_info.dtype))

    def on_tables(self, vocab_size: int, seed: int) -> "BlockDrafter":
        lm = TabularLM(random_rows(vocab_size, seed), vocab_size)
        return replace(self, lm=lm, reads=(0,), block_size=TABLE_BLOCK, mask_id=0, short_list=None)


@dataclass(frozen=True, kw_only=True)
class TrainedBlocks(CheckpointHints, TrainedHead):
    """A head that guesses blocks on disk: the `speculators` layout, or an author's own. What only the user can say of
    it are the fields of `CheckpointHints`.
    """


@dataclass(frozen=True, kw_only=True)
class Anchors:
    """The anchors of some rows, on the host.

    Attributes:
        places: Where they stand.
        real: Which of them count; a row with fewer anchors than another is filled up.
    """

    places: Int[Tensor, "rows anchors"]
    real: Bool[Tensor, "rows anchors"]


@dataclass(frozen=True, kw_only=True)
class _Guesses:
    """The guesses of some blocks that count.

    Attributes:
        inner: What the head makes their logits of, as `BlockHead.states_given_previous` says.
        labels: The text's tokens there.
        rows: The row of each.
        before: The place of the token before each.
        at: Where they stand among all guesses of the blocks, by index in the flattened `valid`.
        valid: Which of all guesses of the blocks count.
        count: How many count. If it is 0, one guess is here all the same.
    """

    inner: Float[Tensor, "n inner"]
    labels: Int[Tensor, " n"]
    rows: Int[Tensor, " n"]
    before: Int[Tensor, " n"]
    at: Int[Tensor, " n"]
    valid: Bool[Tensor, "rows anchors depth"]
    count: int


class BlockObjective(HeadObjective):
    r"""A head that learns to guess blocks along texts.

    Anchors are drawn among the learnt tokens. The block of an anchor at $a$ sees the target's features at positions
    below $a$, because the feature at $a$ is not known while drafting, and its own positions. All blocks of a text run
    in one forward and do not see each other. A position of a block that lies behind the text, or guesses a token that
    is not learnt, counts for nothing.

    A confidence head learns $1 - \mathrm{TV}(p, q)$ of each guess, the chance that token verification accepts it. The
    rest of the head does not learn from that.
    """

    head: BlockHead
    options: BlockOptions

    @cached_property
    def loss(self) -> BlockLoss:
        """What is minimised."""
        return self.options.block_loss(self.divergence, self.head.config.block_size)

    def head_tokens(self, length: int) -> int:
        return length + min(length, self.options.num_anchors) * self.head.config.block_size

    def guess_rows(self, length: int) -> int:
        return min(length, self.options.num_anchors) * self.head.config.max_depth

    def forward(self, batch: TrainBatch) -> Loss:
        """The loss of the guesses of all drawn blocks."""
        batch = self.with_states(batch)
        drawn = self.anchors(batch)
        guesses = self._guesses(batch, self._context(batch), drawn, self.head.config.max_depth)
        of_labels = self.loss.reads_labels
        agreed = torch.zeros(len(guesses.labels), dtype=torch.bool, device=guesses.inner.device)
        log_likelihoods = torch.zeros(len(guesses.labels), device=guesses.inner.device)
        confidence, of = self.head.confidence(guesses.inner.detach()), self.loss.of
        far = torch.zeros(len(guesses.labels), device=guesses.inner.device)
        both = None
        if confidence is not None or of is not None:
            both = self._rows_of_both(self.with_target_rows(batch), guesses)

        def each(rows: slice, logits: Float[Tensor, "rows vocab"]) -> Float[Tensor, " rows"]:
            agreed[rows] = among_likeliest(guesses.labels[rows], logits.detach())
            hard = logits.new_zeros(())
            if of_labels:
                hard = cross_entropy(guesses.labels[rows], logits)
                log_likelihoods[rows] = -hard.detach().float()
            if both is None:
                return hard
            theirs, ours = both(rows, logits)
            if confidence is not None:
                far[rows] = DISTANCE(theirs, ours.detach()).float()
            if of is None:
                return hard
            soft = of(theirs, ours)
            return soft if not self.loss.hard else self.loss.hard * hard + (1 - self.loss.hard) * soft

        values = self.values(batch, guesses.inner, guesses.labels, each)
        if confidence is not None:
            values = values + _misjudged(confidence, far)
        weights = torch.zeros_like(values)
        if guesses.count:
            log_q = torch.zeros(guesses.valid.shape, device=guesses.inner.device)
            log_q.view(-1)[guesses.at] = log_likelihoods
            every = self.loss.weights(log_q, guesses.valid)
            if self.slot_weights is not None:
                every = every * on_device(np.array(self.slot_weights), every.device).to(every)
            weights = every.flatten()[guesses.at]
        return Loss(
            total=(weights * values).sum(),
            weight=weights.sum().double(),
            parts={
                "agreement": (weights * agreed).sum(),
                **({"log_likelihood": (weights * log_likelihoods).sum()} if of_labels else {}),
            },
        )

    def values(
        self, batch: TrainBatch, inner: Float[Tensor, "n inner"], labels: Int[Tensor, " n"], each: LossOfRows
    ) -> Float[Tensor, " n"]:
        """What is minimised of each guess, before it is weighted.

        Args:
            inner: What `BlockHead.logits_given_previous` reads.
            labels: The text's token at each guess.
            each: The loss of the guesses in a slice, from their logits. It also notes how good they are, so its last
                call for a guess must be for the logits that are drafted from.
        """
        return self.of_rows(inner, self.head.logits_given_previous, each)

    def of_rows(
        self,
        inner: Float[Tensor, "n inner"],
        logits: Callable[[Float[Tensor, "rows inner"]], Float[Tensor, "rows vocab"]],
        each: LossOfRows,
    ) -> Float[Tensor, " n"]:
        """The losses of guesses, whose logits are in memory for some at a time."""
        return chunked(each, inner, logits, chunk=self.chunk, width=self.head.vocab_size)

    def places_of(self, documents: Sequence[Document], max_length: int) -> Float[Tensor, " depths"]:
        """How many anchors of some texts have a guess at each depth, in rows of at most so many tokens."""
        depths, counts = np.arange(self.head.config.max_depth), np.zeros(self.head.config.max_depth, dtype=np.int64)
        for document in documents:
            learnt = min(len(document.tokens) - document.start, max_length)
            counts += np.maximum(learnt - 1 - depths, 0)
        return torch.from_numpy(counts).double()

    def anchors(self, batch: TrainBatch) -> Anchors:
        """The anchors of the rows in the batch's step, in order. Each is a learnt token that another follows."""
        learnt = batch.host.learnt
        drawn: list[Int[np.ndarray, " anchors"]] = []
        for row, number in enumerate(batch.rows):
            places = np.flatnonzero(learnt[row, :-1] & learnt[row, 1:])
            if not len(places):
                # The one learnt token follows a prompt.
                places = np.flatnonzero(learnt[row, 1:])
            dice = step_generator(Purpose.ANCHORS, seed=self.context.seed, step=batch.step, row=number)
            drawn.append(np.sort(dice.permutation(places)[: self.options.num_anchors]))
        return _filled(drawn)

    @torch.no_grad()
    def judged(self, batch: TrainBatch, depth: int) -> JudgedDrafts:
        """Drafts along the texts of a batch, which begin behind every learnt token."""
        self.head.check_depth(depth)
        if batch.learnt.shape[1] <= depth:
            return JudgedDrafts(log_ratios=np.zeros((0, depth)), agrees=np.zeros((0, depth), dtype=bool))
        batch = self.with_target_rows(self.with_states(batch))
        begins = torch.from_numpy(batch.host.learnt).unfold(1, depth + 1, 1).all(-1).numpy()
        every, context = _filled([np.flatnonzero(row) for row in begins]), self._context(batch)
        ratios, agrees = [np.zeros((0, depth))], [np.zeros((0, depth), dtype=bool)]
        for first in range(0, every.places.shape[1], JUDGED_AT_ONCE):
            part = slice(first, first + JUDGED_AT_ONCE)
            some = Anchors(places=every.places[:, part], real=every.real[:, part])
            if not some.real.any():
                continue
            guesses = self._guesses(batch, context, some, depth)
            values, equal = self._compared(batch, guesses)
            # Blocks that count have `depth` guesses that count.
            ratios.append(values.view(-1, depth).double().cpu().numpy())
            agrees.append(equal.view(-1, depth).cpu().numpy())
        return JudgedDrafts(log_ratios=np.concatenate(ratios), agrees=np.concatenate(agrees))

    def record(self, dtype: torch.dtype) -> HeadFiles:
        config, tensors = super().record(dtype)
        if "speculators_config" in config:
            config["speculators_config"]["verifier"]["architectures"] = [type(self.context.target).__name__]
        return config, tensors

    def with_states(self, batch: TrainBatch) -> TrainBatch:
        """As of every head; where the target's rows were captured, its last states are not needed."""
        captured = batch.logits_of_target is not None or batch.rows_of_target is not None
        return batch if captured and set(self.taps) <= batch.hidden.keys() else super().with_states(batch)

    def _context(self, batch: TrainBatch) -> GroupKeys:
        """Keys and values of all positions of the texts."""
        cache, weight = GroupKeys(self.head.config.block_size), self.head.norm.weight
        features = torch.cat([batch.hidden[tap].to(weight.dtype) for tap in self.taps], -1)
        rows, length = batch.tokens.shape
        places = torch.arange(length, device=batch.tokens.device).expand(rows, -1)
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=batch.tokens.device)
        sees = mask.expand(rows, 1, length, length)
        self.head(HeadInputs(tokens=batch.tokens, features=features, positions=places, mask=sees, cache=cache))
        return cache

    def _guesses(self, batch: TrainBatch, context: GroupKeys, anchors: Anchors, depth: int) -> _Guesses:
        """The first `depth` guesses of the blocks of some anchors; one that counts for nothing if there are none."""
        config, host, device = self.head.config, batch.host, batch.tokens.device
        before = anchors.places.numpy()[..., None] + np.arange(depth)
        inside = before + 1 < host.lengths[:, None, None]
        before = before.clip(max=host.tokens.shape[1] - 2)
        rows = np.broadcast_to(np.arange(len(before))[:, None, None], before.shape)
        valid = anchors.real.numpy()[..., None] & inside & host.learnt[rows, before + 1]
        at = np.flatnonzero(valid)
        kept = at if len(at) else np.zeros(1, dtype=np.int64)
        places = anchors.places.numpy()
        hidden = blocks(self.head, batch.tokens, context, on_device(places, device))
        preceding = host.tokens[rows[..., 0], (places - 1).clip(min=0)]
        hidden = self.head.guess_features(hidden, preceding)
        known = on_device(host.tokens[rows, before], device)
        inner = self.head.states_given_previous(hidden[:, :, config.first : config.first + depth], known)
        where = on_device(kept, device)
        return _Guesses(
            inner=inner.flatten(0, 2)[where],
            labels=on_device(host.tokens[rows, before + 1].ravel()[kept], device),
            rows=on_device(rows.ravel()[kept], device),
            before=on_device(before.ravel()[kept], device),
            at=where,
            valid=on_device(valid, device),
            count=len(at),
        )

    def _rows_of_both(self, batch: TrainBatch, guesses: _Guesses) -> RowsOfBoth:
        """The target's rows of some guesses and the head's own, over the same outcomes."""
        if batch.logits_of_target is None and batch.rows_of_target is not None:
            kept, places = batch.rows_of_target, (guesses.rows, guesses.before)
            top = TopRows(tokens=kept.tokens[places], log_probs=kept.log_probs[places], log_rest=kept.log_rest[places])
            return lambda rows, draft: (top[rows].outcomes, top[rows].grouped(draft))

        def live(rows: slice, draft: Float[Tensor, "rows vocab"]) -> tuple[Tensor, Tensor]:
            logits = self._target_logits(batch, guesses, rows)
            width = min(logits.shape[-1], draft.shape[-1])
            return logits[..., :width], draft[..., :width]

        return live

    @torch.no_grad()
    def _target_logits(self, batch: TrainBatch, guesses: _Guesses, rows: slice) -> Float[Tensor, "rows vocab"]:
        """The target's logits of the tokens that some guesses are of."""
        places = (guesses.rows[rows], guesses.before[rows])
        if batch.logits_of_target is not None:
            return rows_at(batch.logits_of_target, *places)
        return self.embedding_and_head.head(self.embedding_and_head.norm(batch.hidden[self.shape.num_layers][places]))

    def _compared(self, batch: TrainBatch, guesses: _Guesses) -> tuple[Float[Tensor, " n"], Bool[Tensor, " n"]]:
        """The log-ratio of each label's probabilities, and whether the likeliest tokens of both agree."""
        ratios, agrees = [], []
        for begin in range(0, len(guesses.labels), self.chunk):
            rows = slice(begin, begin + self.chunk)
            ours, theirs = (
                self.head.logits_given_previous(guesses.inner[rows]),
                self._target_logits(batch, guesses, rows),
            )
            width = min(ours.shape[-1], theirs.shape[-1])
            log_q, log_p = (each[..., :width].float().log_softmax(-1) for each in (ours, theirs))
            ratios.append((log_q - log_p).gather(-1, guesses.labels[rows, None])[:, 0])
            agrees.append(log_q.argmax(-1) == log_p.argmax(-1))
        return torch.cat(ratios), torch.cat(agrees)


def blocks(
    head: BlockHead, tokens: Int[Tensor, "rows length"], context: GroupKeys, places: Int[Tensor, "rows anchors"]
) -> Float[Tensor, "rows anchors block hidden"]:
    """The output features of the blocks of some anchors, all in one forward.

    Args:
        context: Keys and values of all positions of the texts.
        places: Where the anchors stand.
    """
    size, length = head.config.block_size, tokens.shape[1]
    read = torch.full((*places.shape, size), head.config.mask_id, device=tokens.device)
    read[..., 0] = tokens.gather(1, places)
    positions = (places[..., None] + torch.arange(size, device=tokens.device)).flatten(1)
    along = torch.arange(length, device=tokens.device)
    number = torch.arange(positions.shape[1], device=tokens.device) // size
    behind = along < places.repeat_interleave(size, 1)[..., None]
    together = (number[:, None] == number).expand(len(tokens), -1, -1)
    keys = torch.cat([along.expand(len(tokens), -1), positions], 1)
    mask = torch.cat([behind, together], -1)[:, None]
    inputs = HeadInputs(tokens=read.flatten(1), features=None, positions=positions, mask=mask, cache=context)
    return head.block(inputs, keys).unflatten(1, (-1, size))


def _misjudged(confidence: Float[Tensor, " n"], far: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """The divergence of what a confidence head says from what it should say: 1 less the distance of the rows.

    Args:
        confidence: Its logits.
        far: The distances.
    """
    # A sum of rounded differences may be a little above 1.
    far = far.clamp(0, 1)
    least = torch.special.entr(far) + torch.special.entr(1 - far)
    return binary_cross_entropy_with_logits(confidence.float(), 1 - far, reduction="none") - least


def _filled(drawn: list[Int[np.ndarray, " _"]]) -> Anchors:
    """Anchors of rows that have different numbers of them."""
    most = max(1, *(len(each) for each in drawn))
    places = np.zeros((len(drawn), most), dtype=np.int64)
    for row, each in enumerate(drawn):
        places[row, : len(each)] = each
    real = np.arange(most) < np.array([len(each) for each in drawn])[:, None]
    return Anchors(places=torch.from_numpy(places), real=torch.from_numpy(real))
