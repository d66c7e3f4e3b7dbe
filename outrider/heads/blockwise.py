r"""Blockwise heads: a small feed-forward for each guessed token, and the target's output layer (Stern et al. 2018).

A small language model may choose among their guesses, or an n-gram model may find the best paths through them:
Kim et al. 2024, Exploring and improving drafts in blockwise parallel decoding. https://arxiv.org/abs/2404.09221
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import relu

from outrider.core.dice import Purpose, step_generator
from outrider.core.option import check, option
from outrider.core.types import Frontier, Guess, InputError, Request, Running
from outrider.drafters.exports import Exports
from outrider.drafters.model import ModelDrafter, ModelPath
from outrider.drafters.protocol import Observed, Rows
from outrider.heads.head import HeadFiles, TrainedHead
from outrider.heads.objective import HeadContext
from outrider.heads.parts.backoff import FILE, BackoffModel, read_backoff, write_backoff
from outrider.heads.parts.best_paths import BestPaths, best_paths
from outrider.heads.spec import HeadSpec
from outrider.heads.trunks.last_state import (
    HeadsState,
    LastStateHead,
    StateHeads,
    StateHeadsDrafter,
    StateHeadsObjective,
    StateHeadsOptions,
    randomise,
)
from outrider.learning.batch import TrainBatch
from outrider.learning.options import loss, size
from outrider.lm.hf.checkpoint import KIND, MOST_COUNT, TARGET, Checkpoint, TargetShape, build_module, local_file
from outrider.lm.hf.checkpoint import size as size_in
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead
from outrider.lm.tabular import TABLE_FEATURES
from outrider.lm.target_info import TargetInfo
from outrider.trees.chained import Follow

NAME = "blockwise"
"""The value of the key `KIND`."""
LOWEST = -1e4
"""A logit so low that its token has the probability 0 beside any path, at any usual temperature."""


@dataclass(frozen=True, kw_only=True)
class BlockwiseOptions(StateHeadsOptions):
    """Train blockwise heads: each guesses one depth of a draft from the target's last hidden state.

    All heads use the target's output layer. The command ends with the tree that fits their accuracies, for --tree.

    Attributes:
        intermediate_size: Width of each head between its two matrices. By default the target's width.
        one_head: Learn one drawn head in each step, which needs less memory and time.
        ngram_order: Most tokens of an n-gram. An n-gram model is counted on --data and written beside the heads; 0
            counts none.
        ngram_least: How often an n-gram must be seen to be kept.
    """

    intermediate_size: int | None = size(None, least=1)
    one_head: bool = loss(False)
    ngram_order: int = loss(3, among=range(5))
    ngram_least: int = loss(2, least=1)


@dataclass(frozen=True, kw_only=True)
class BlockwiseConfig:
    """The sizes of blockwise heads.

    Attributes:
        hidden_size: Width of the target's hidden states.
        vocab_size: Width of the target's logits.
        num_heads: Number of heads; head i guesses the i-th token behind the anchor.
        intermediate_size: Width of each head between its two matrices.

    Raises:
        InputError: A number is below 1.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int = 5
    intermediate_size: int

    def __post_init__(self) -> None:
        for name in ("hidden_size", "vocab_size", "num_heads", "intermediate_size"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} of blockwise heads must be >= 1, got {getattr(self, name)}")


class FeedForward(nn.Module):
    r"""$f + W_2 \mathrm{ReLU}(W_1 f + b_1) + b_2$. At the start $W_2 = 0$, so that it returns its input."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(size, inner), nn.Linear(inner, size)
        for parameter in self.down.parameters():
            nn.init.zeros_(parameter)

    def forward(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch hidden"]:
        return hidden + self.down(relu(self.up(hidden)))


class BlockwiseHeads(StateHeads):
    """Heads of two matrices each. All share the target's output layer, which is no part of them.

    In the paper the target learns with its heads, and its own guess of the next token counts as the first head. Here
    the target stays as it is, so that its first guess needs no head.

    Args:
        config: The sizes.
        embedding_and_head: Those of the target.

    References:
        Stern et al. 2018. https://arxiv.org/abs/1811.03115
    """

    embedding_and_head: EmbeddingAndHead

    def __init__(self, config: BlockwiseConfig, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__()
        self.config, self.embedding_and_head, self.max_depth = config, embedding_and_head, config.num_heads
        self.heads = nn.ModuleList(
            FeedForward(config.hidden_size, config.intermediate_size) for _ in range(config.num_heads)
        )

    @classmethod
    def new(cls, options: BlockwiseOptions, context: HeadContext) -> "BlockwiseHeads":
        info = context.info
        config = BlockwiseConfig(
            hidden_size=info.hidden_size,
            vocab_size=info.vocab_size,
            num_heads=context.depth,
            intermediate_size=options.intermediate_size or info.hidden_size,
        )
        return cls(config, info.embedding_and_head())

    @classmethod
    def load(cls, checkpoint: Checkpoint, target: TargetInfo, trained: TrainedHead) -> "BlockwiseHeads":
        path, raw_config = checkpoint.path, checkpoint.config
        if not published(raw_config, ()):
            raise InputError(f"{path} holds no blockwise heads: its config has no {KIND} {NAME!r}")
        config = BlockwiseConfig(
            hidden_size=size_in(raw_config, "hidden_size", path),
            vocab_size=size_in(raw_config, "vocab_size", path),
            num_heads=size_in(raw_config, "num_heads", path, most=MOST_COUNT),
            intermediate_size=size_in(raw_config, "intermediate_size", path),
        )
        heads = build_module(lambda: cls(config, target.embedding_and_head()), checkpoint.tensors(), path)
        trained.check_target(checkpoint.target, config.hidden_size, target)
        trained.check_vocabulary(config.vocab_size, target)
        return heads

    @property
    def weight(self) -> Float[Tensor, "inner hidden"]:
        return cast(FeedForward, self.heads[0]).up.weight

    def forward(self, hidden: Float[Tensor, "*batch hidden"], number: int) -> Float[Tensor, "*batch hidden"]:
        return cast(Tensor, self.heads[number](hidden))

    def logits(self, hidden: Float[Tensor, "*batch hidden"], number: int) -> Float[Tensor, "*batch vocab"]:
        return self.embedding_and_head.logits(hidden)[..., : self.config.vocab_size]

    def record(self, target: TargetShape, dtype: torch.dtype, name: str) -> HeadFiles:
        """Their sizes, and the tensors `heads.{i}.up` and `heads.{i}.down`, weights and biases."""
        config = {
            "architectures": ["BlockwiseHeads"],
            KIND: NAME,
            "hidden_size": self.config.hidden_size,
            "vocab_size": self.config.vocab_size,
            "num_heads": self.config.num_heads,
            "intermediate_size": self.config.intermediate_size,
            "torch_dtype": str(dtype).removeprefix("torch."),
            TARGET: target.record(),
        }
        return config, self.state_dict()

    def on_tables(self, vocab_size: int, seed: int) -> "BlockwiseHeads":
        dice = torch.Generator().manual_seed(seed)
        output = torch.randn(TABLE_FEATURES, vocab_size, dtype=torch.float64, generator=dice)
        config = BlockwiseConfig(
            hidden_size=TABLE_FEATURES,
            vocab_size=vocab_size,
            num_heads=self.max_depth,
            intermediate_size=TABLE_FEATURES,
        )
        embedding_and_head = EmbeddingAndHead(
            embed=nn.Identity(), norm=nn.Identity(), head=lambda hidden: hidden @ output
        )
        heads = BlockwiseHeads(config, embedding_and_head).double().eval()
        randomise(heads, seed)
        return heads


@dataclass(frozen=True, kw_only=True)
class BlockwiseDrafter(StateHeadsDrafter[HeadsState]):
    """Guess with blockwise heads.

    References:
        Stern et al. 2018. https://arxiv.org/abs/1811.03115
    """

    @classmethod
    def of(cls, head: LastStateHead, target: TargetInfo, trained: TrainedHead) -> StateHeadsDrafter:
        """The drafter with heads, and with what refines their drafts."""
        fields, options = cls.fields_of(head, target, trained), cast(TrainedBlockwise, trained)
        if options.rescorer is not None:
            model = ModelPath(
                path=options.rescorer, device=options.device, dtype=options.dtype, max_context=options.max_context
            )
            return RescoredDrafter(**fields, rescorer=model.bind(target), lam=options.lam, top_k=options.top_k)
        if options.paths is None:
            return cls(**fields)
        grams = options.grams(fields["head"].config.vocab_size) if options.mu else None
        return PathsDrafter(
            **fields, model=grams, paths=options.paths, mu=options.mu, top_k=options.top_k, beam=options.beam
        )


@dataclass(kw_only=True)
class RescoredState(HeadsState):
    """What the heads keep of a request, and what the language model keeps; changes in place.

    Attributes:
        rescorer: The language model's state.
    """

    rescorer: object = None


@dataclass(frozen=True, kw_only=True)
class RescoredDrafter(StateHeadsDrafter[RescoredState]):
    r"""Draft a chain, left to right: of the `top_k` likeliest tokens of a depth's head, the one with the largest

    $(1 - \lambda)\,a_i(v) + \lambda\,r(v \mid \text{context}, y_1 \ldots y_{i-1})$.

    $a_i$ are the head's logits and $r$ those of the language model behind the draft so far. So each draft token costs
    a forward of the language model. With $\lambda = 0$ the draft is that of the heads alone.

    Attributes:
        rescorer: The language model. Its cache holds committed tokens.
        lam: $\lambda$.
        top_k: How many tokens of each head it chooses among.

    References:
        Kim et al. 2024, local rescoring. https://arxiv.org/abs/2404.09221
    """

    rows: ClassVar[Rows] = "point"
    keeps_cache: ClassVar[bool] = True
    state: ClassVar[type[Any]] = RescoredState

    rescorer: ModelDrafter
    lam: float
    top_k: int

    @property
    def max_context(self) -> int | None:
        return self.rescorer.max_context

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        return {**super().modules, **self.rescorer.modules}

    def open(self, request: Request) -> RescoredState:
        return RescoredState(rescorer=self.rescorer.open(request))

    def observe(self, states: Sequence[Running], observed: Observed) -> None:
        super().observe(states, observed)
        self.rescorer.observe(self._theirs(states), observed)

    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess:
        super().begin(states, depths)
        guess = self.rescorer.begin(self._theirs(states), depths)
        return Guess(tokens=self._chosen(states, [0] * len(states), guess))

    def expand(self, states: Sequence[Running], frontier: Frontier) -> Guess:
        owners = [states[owner] for owner in frontier.owners.tolist()]
        theirs = dict(zip(frontier.owners.tolist(), self._theirs(owners), strict=True))
        # Requests of the batch without a node may have another drafter.
        guess = self.rescorer.expand([theirs.get(i, state) for i, state in enumerate(states)], frontier)
        return Guess(tokens=self._chosen(owners, frontier.depths.tolist(), guess))

    def commit(self, states: Sequence[Running], paths: Sequence[Sequence[int]]) -> None:
        self.rescorer.commit(self._theirs(states), paths)

    def reuse(self, state: object, request: Request, length: int) -> RescoredState:
        theirs = self.rescorer.reuse(self.checked(state).rescorer, request, length)
        return replace(super().reuse(state, request, length), rescorer=theirs)

    def fork(self, state: object, request: Request, length: int) -> RescoredState:
        theirs = self.rescorer.fork(self.checked(state).rescorer, request, length)
        return replace(super().fork(state, request, length), rescorer=theirs)

    def close(self, state: object) -> None:
        self.rescorer.close(self.checked(state).rescorer)

    def cast(self, target_info: TargetInfo) -> "RescoredDrafter":
        return replace(super().cast(target_info), rescorer=self.rescorer.cast(target_info))

    def on_tables(self, vocab_size: int, seed: int) -> "RescoredDrafter":
        return replace(super().on_tables(vocab_size, seed), rescorer=self.rescorer.on_tables(vocab_size, seed + 1))

    def _theirs(self, states: Sequence[Running]) -> list[Running]:
        """The requests as the language model sees them."""
        return [replace(state, drafter_state=self.state_of(state).rescorer) for state in states]

    @torch.inference_mode()
    def _chosen(self, states: Sequence[Running], depths: Sequence[int], guess: Guess) -> Int[np.ndarray, " n"]:
        """The token behind a node of each depth, from the language model's guess there."""
        if guess.logits is None:
            raise TypeError("a language model guesses logits")
        rows = torch.stack([self.row(state, depth) for state, depth in zip(states, depths, strict=True)])
        best = rows.topk(min(self.top_k, rows.shape[1]), -1)
        theirs = guess.logits.to(rows.device).gather(-1, best.indices)
        mixed = (1 - self.lam) * best.values + self.lam * theirs
        return best.indices.gather(-1, mixed.argmax(-1, keepdim=True))[:, 0].cpu().numpy()


@dataclass(kw_only=True)
class PathsState(HeadsState):
    """What the heads keep of a request, and the paths of the last draft; changes in place.

    Attributes:
        paths: The best paths; None before any draft.
        prefixes: For the root and each expanded node, the draft tokens up to it.
    """

    paths: BestPaths | None = None
    prefixes: dict[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PathsDrafter(StateHeadsDrafter[PathsState]):
    r"""Find the best paths through the `top_k` likeliest tokens of every head, and guess what follows in them.

    A path $y$ has the score $\sum_i a_i(y_i) + \mu \sum_i \log G(y_i \mid \text{tokens before})$, with $a_i$ the
    logarithms of the head's probabilities and $G$ an n-gram model. The row behind a prefix is the law of the next token
    if a path is drawn with probability proportional to $e^s$. So a tree of chosen tokens that is wide enough (`dynamic`
    with a `width` of at least the number of paths) is all paths together, each of them once; and a chain, or a drawn
    tree, draws among the paths.

    Attributes:
        model: $G$.
        paths: How many paths.
        mu: $\mu$.
        top_k: How many tokens of each head may stand in a path.
        beam: Prefixes that the search keeps at each depth.

    References:
        Kim et al. 2024, global rescoring. https://arxiv.org/abs/2404.09221
    """

    rows: ClassVar[Rows] = "sampled"
    state: ClassVar[type[Any]] = PathsState

    model: BackoffModel | None
    paths: int
    mu: float
    top_k: int
    beam: int

    @torch.inference_mode()
    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess:
        super().begin(states, depths)
        guessed = [rows for state in states if (rows := self.guessed(state)) is not None]
        logs = _wide(torch.stack(guessed)).log_softmax(-1)
        best = logs.topk(min(self.top_k, logs.shape[-1]), -1)
        tokens, scores = best.indices.cpu().numpy(), best.values.double().cpu().numpy()
        for i, (state, depth) in enumerate(zip(states, depths, strict=True)):
            drafter_state = self.state_of(state)
            drafter_state.prefixes = {0: ()}
            drafter_state.paths = best_paths(
                tokens[i, :depth],
                scores[i, :depth],
                count=self.paths,
                beam=self.beam,
                context=state.tokens[-3:],
                model=self.model,
                mu=self.mu,
            )
        return Guess(logits=torch.stack([self._behind(state, ()) for state in states]))

    def expand(self, states: Sequence[Running], frontier: Frontier) -> Guess:
        rows = []
        nodes = zip(frontier.owners.tolist(), frontier.parents.tolist(), frontier.nodes.tolist(), strict=True)
        for (owner, parent, node), token in zip(nodes, frontier.tokens.tolist(), strict=True):
            drafter_state = self.state_of(states[owner])
            drafter_state.prefixes[node] = (*drafter_state.prefixes[parent], token)
            rows.append(self._behind(states[owner], drafter_state.prefixes[node]))
        return Guess(logits=torch.stack(rows))

    def chain(self, states: Sequence[Running], counts: Sequence[int]) -> Follow:
        drafted: list[tuple[int, ...]] = [()] * len(states)

        def step(tokens: Int[Tensor, " n"]) -> Float[Tensor, "n width"]:
            alive = [i for i, count in enumerate(counts) if count > len(drafted[i])]
            for i, token in zip(alive, tokens.tolist(), strict=True):
                drafted[i] = (*drafted[i], token)
            return torch.stack([self._behind(states[i], drafted[i]) for i in alive])

        return step

    def on_tables(self, vocab_size: int, seed: int) -> "PathsDrafter":
        text = np.random.default_rng(seed).integers(vocab_size, size=40)
        model = None if self.model is None else BackoffModel.count([text], vocab_size=vocab_size, least=1)
        return replace(super().on_tables(vocab_size, seed), model=model)

    def _behind(self, state: Running, prefix: tuple[int, ...]) -> Float[Tensor, " width"]:
        """Logits behind a prefix of a draft; -inf for tokens that follow it in no path."""
        paths = self.state_of(state).paths
        if paths is None:
            raise RuntimeError("paths are found before nodes are expanded")
        tokens, scores = paths.behind(prefix)
        marginal = _wide(self.row(state, len(prefix)))
        if not len(tokens):
            return marginal
        sampling = state.request.sampling
        # A processor may forbid the tokens of all paths. Then others are drawn.
        forbids = bool(sampling.processors or sampling.logit_bias)
        row = torch.full_like(marginal, LOWEST if forbids else -torch.inf)
        row[torch.from_numpy(tokens).to(row.device)] = torch.from_numpy(scores).to(row)
        return row


class BlockwiseObjective(StateHeadsObjective):
    r"""Blockwise heads that learn from a target, with an n-gram model beside them.

    With `one_head`, each step computes the loss of one head, drawn with probability proportional to its weight. So the
    mean over steps is the weighted mean of the losses of all heads, and a step holds the logits of one.
    """

    options: BlockwiseOptions

    @cached_property
    def grams(self) -> BackoffModel | None:
        """The n-gram model of the texts; without texts, the one beside the heads that are trained further."""
        options, documents = self.options, self.context.documents
        if not options.ngram_order:
            return None
        if documents:
            return BackoffModel.count(
                (document.tokens for document in documents),
                vocab_size=self.shape.vocab_size,
                order=options.ngram_order,
                least=options.ngram_least,
            )
        file = None if options.init_from is None else local_file(options.init_from, FILE)
        return None if file is None else read_backoff(file)

    def counted(self, batch: TrainBatch) -> Collection[int]:
        """All heads, or the step's own."""
        if not self.options.one_head or not self.training:
            return super().counted(batch)
        weights = self.options.decay ** np.arange(self.num_guesses)
        dice = step_generator(Purpose.HEAD, seed=self.context.seed, step=batch.step)
        return (int(dice.choice(self.num_guesses, p=weights / weights.sum())),)

    def write(self, folder: Path) -> None:
        """Write the heads, and the n-gram model beside them."""
        super().write(folder)
        if self.grams is not None:
            write_backoff(self.grams, folder)


@dataclass(frozen=True, kw_only=True)
class TrainedBlockwise(TrainedHead):
    """Blockwise heads on disk, and what refines their drafts.

    Attributes:
        max_context: Longest context of the rescorer; by default the target's.
        rescorer: A small draft model that chooses among the likeliest tokens of each head: a directory or a hub id.
        lam: How much the rescorer's logits count, 0 to 1; those of the head count the rest.
        paths: How many of the best paths through the heads' likeliest tokens are drafted; by default the heads' own
            guesses are drafted as they are.
        mu: How much the n-gram model counts in the score of a path, 0 or more.
        top_k: How many of a head's likeliest tokens are refined.
        beam: Prefixes that the search for paths keeps at each depth.
    """

    rescorer: str | None = None
    lam: float = option(0.5, least=0, most=1)
    paths: int | None = option(None, least=1)
    mu: float = option(0.5, least=0, finite=False)
    top_k: int = option(16, least=1)
    beam: int = option(64, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self)
        if self.rescorer is not None and self.paths is not None:
            raise InputError("blockwise heads draft either with a rescorer or by paths; leave out rescorer or paths")

    def grams(self, vocab_size: int) -> BackoffModel:
        """The n-gram model beside the heads. Raises InputError if there is none, or it is of another vocabulary."""
        file = local_file(self.path, FILE, revision=self.revision)
        if file is None:
            raise InputError(
                f"there is no n-gram model ({FILE}) in {self.path}; train the heads with one, or give mu=0"
            )
        model = read_backoff(file)
        if model.vocab_size != vocab_size:
            raise InputError(f"{file} knows {model.vocab_size:,} tokens, and the heads beside it {vocab_size:,}")
        return model


def published(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether a checkpoint is blockwise heads."""
    return config.get(KIND) == NAME


def _wide(logits: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
    """Logits in float32; float64 stays."""
    return logits if logits.dtype == torch.float64 else logits.float()


SPEC = HeadSpec(
    name=NAME,
    head=BlockwiseHeads,
    drafter=BlockwiseDrafter,
    published=published,
    trained=TrainedBlockwise,
    options=BlockwiseOptions,
    objective=BlockwiseObjective,
    exports=Exports(instead="medusa"),
)
