"""What training needs, told before it starts, from shapes alone: no weights are read or made.

The memory of weights, gradients and optimizer is exact. The memory of activations is a closed form, counted in
`tests/training/test_estimate.py` against the tensors that torch saves. Hours are operations over a rate.
"""

import math
import time
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from outrider.core.types import InputError
from outrider.heads.objective import HeadObjective
from outrider.learning.divergences import worth_keeping

MASTER = 4
"""Bytes of a trained weight, of its gradient, and of each of AdamW's two moments."""
LOGIT_COPIES = 6
"""Float32 tensors of a chunk of logits at once: both models' logits, their log-probabilities, a product, a gradient."""
KEPT_COPIES = 2
"""Tensors of all logits that stay until the backward where they are few: the drafter's and their gradients."""
FORWARD_COPIES = 8
"""Vectors of the width that a forward of the target holds of a token beside those that are kept."""
PROGRAM = 400_000_000
"""Bytes of Python and its libraries."""
RATE_SIZE = 1024
"""Rows and columns of the matrices whose product is timed."""
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Names that configs use for the number of experts."""
HOUR, MILLION = 3600, 1e6


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one process does at once.

    Attributes:
        rows: Rows of a micro-batch.
        length: Tokens of a row.
        chunk: Rows of logits that are computed at once; None computes all at once.
        activation_bytes: Bytes of a number between layers: 4 in float32, 2 in mixed precision.
        num_shards: Processes over which FSDP divides weights, gradients and optimizer; 1 divides nothing.
    """

    rows: int
    length: int
    chunk: int | None = None
    activation_bytes: int = 4
    num_shards: int = 1

    def __post_init__(self) -> None:
        for name in ("rows", "length", "activation_bytes", "num_shards"):
            if (value := getattr(self, name)) < 1:
                raise InputError(f"{name} must be >= 1, got {value}")

    @property
    def num_tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.rows * self.length


@dataclass(frozen=True, kw_only=True)
class TrainEstimate:
    """Bytes on one device, and floating-point operations.

    Attributes:
        num_trained: Parameters that are trained.
        num_frozen: Parameters of the target.
        weights: Trained weights in float32, and their copies in half precision where precision is mixed.
        gradients: Gradients.
        optimizer: AdamW's two moments.
        target: The target's weights.
        activations: What the backward pass needs of a micro-batch.
        logits: A chunk of logits of both models, and all logits where these stay until the backward.
        flops_per_token: Of the matrix products, for one token of training: forward and backward of the trained model,
            forward of the target.
    """

    num_trained: int
    num_frozen: int
    weights: int
    gradients: int
    optimizer: int
    target: int
    activations: int
    logits: int
    flops_per_token: float

    @property
    def total(self) -> int:
        """All bytes, with those of Python and its libraries."""
        parts = self.weights + self.gradients + self.optimizer + self.target + self.activations + self.logits
        return parts + PROGRAM

    def share(self, part: float) -> int:
        """Bytes of the weights, gradients and optimizer of a part of the trained parameters."""
        return int(part * (self.weights + self.gradients + self.optimizer))

    def hours_per_million(self, flops_per_second: float) -> float:
        """Hours to train on a million tokens, at a rate of operations such as `operations_per_second`."""
        return self.flops_per_token * MILLION / flops_per_second / HOUR

    def __str__(self) -> str:
        parts = ("weights", "gradients", "optimizer", "target", "activations", "logits")
        listed = f"Python and its libraries {_size(PROGRAM)}, "
        listed += ", ".join(f"{name} {_size(getattr(self, name))}" for name in parts if getattr(self, name))
        return (
            f"{self.num_trained:,} trained parameters, {self.num_frozen:,} of the target; about {_size(self.total)} of "
            f"memory: {listed}"
        )


def estimate(
    draft: PreTrainedConfig | PreTrainedModel,
    target: PreTrainedConfig | PreTrainedModel | None,
    work: Work,
    *,
    target_bytes: int = 2,
) -> TrainEstimate:
    """What it takes to train a draft model against a target.

    Args:
        draft: The model that is trained. A config is enough: no weights are made.
        target: The target; None if its states were captured.
        target_bytes: Bytes of a weight of the target.
    """
    trained, frozen = skeleton(draft), None if target is None else skeleton(target)
    num_trained, num_frozen = num_parameters(trained), 0 if frozen is None else num_parameters(frozen)
    copies = work.activation_bytes if work.activation_bytes < MASTER else 0
    chunk = min(work.chunk or work.num_tokens, work.num_tokens)
    width = max(_text(model).vocab_size for model in (trained, frozen) if model is not None)
    kept = work.num_tokens - chunk if worth_keeping(work.num_tokens, width) else 0
    backward = 3 * forward_flops(trained, work.length)
    return TrainEstimate(
        num_trained=num_trained,
        num_frozen=num_frozen,
        weights=(MASTER + copies) * num_trained // work.num_shards,
        gradients=MASTER * num_trained // work.num_shards,
        optimizer=2 * MASTER * num_trained // work.num_shards,
        target=target_bytes * num_frozen,
        activations=work.num_tokens * work.activation_bytes * activations_per_token(trained),
        logits=(LOGIT_COPIES * 4 * chunk + KEPT_COPIES * work.activation_bytes * kept) * width,
        flops_per_token=backward + (0 if frozen is None else forward_flops(frozen, work.length)),
    )


def num_parameters(model: nn.Module) -> int:
    """Parameters of a model. A tied weight counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def activations_per_token(model: PreTrainedModel) -> int:
    r"""Numbers that the backward pass keeps of one token, without the output layer.

    For width $h$, queries of width $a$, keys and values of width $k$ each and feed-forwards of width $f$, a layer keeps
    the input, the normed input and the scaled input of two norms, queries, keys, values, the attention's output twice,
    and four vectors of the feed-forward: $6 h + 3 a + 2 k + 4 f$. A norm of queries and keys keeps two more of each. A
    mixture keeps $f$ of each chosen expert, and its inputs and outputs. Outside the layers, $3 h$ are kept.
    """
    text = _text(model)
    h, heads = text.hidden_size, text.num_attention_heads
    head = getattr(text, "head_dim", None) or h // heads
    a, k = heads * head, (getattr(text, "num_key_value_heads", None) or heads) * head
    normed = any(name.endswith("q_norm.weight") for name, _ in model.named_parameters())
    _, chosen = _experts(text)
    f = chosen * _feed_forward(text)
    layer = 6 * h + (5 if normed else 3) * a + (3 if normed else 2) * k + 4 * f + (2 * chosen * h if chosen > 1 else 0)
    return int(text.num_hidden_layers * layer + 3 * h)


def forward_flops(model: PreTrainedModel, length: int) -> float:
    r"""Operations of the matrix products in the forward pass of one token, on average over a text.

    Two for each weight that multiplies the token, and $4 \cdot a \cdot n / 2$ a layer for the attention, where $a$ is
    the width of the queries and $n$ the length. Of experts, the chosen share counts.
    """
    text = _text(model)
    number, chosen = _experts(text)
    embedded = {id(weight) for weight in model.get_input_embeddings().parameters()}
    products = text.hidden_size * text.vocab_size
    head = model.get_output_embeddings()
    outside = embedded | ({id(weight) for weight in head.parameters()} if head is not None else set())
    total = float(products)
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and id(weight) not in outside:
            total += weight.numel() * (chosen / number if number > 1 and ".experts." in f".{name}." else 1)
    width = text.num_attention_heads * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    return 2 * total + 2 * width * length * text.num_hidden_layers


def head_estimate(learner: HeadObjective, target: PreTrainedModel, work: Work, *, target_bytes: int) -> TrainEstimate:
    """What it takes to train a head against a target.

    Args:
        learner: The head's objective; it may be on the meta device.
        target: The target; it may be on the meta device.
        target_bytes: Bytes of a weight of the target.
    """
    text, width = _text(target), _width(learner)
    trained = [p for p in learner.head.parameters() if p.requires_grad]
    inner = [p for p in trained if p.dim() > 1 and width not in p.shape]
    num_trained = sum(p.numel() for p in trained)
    copies = work.activation_bytes if work.activation_bytes < MASTER else 0
    passed, guessed = (work.rows * each for each in (learner.head_tokens(work.length), learner.guess_rows(work.length)))
    passed_numbers = sum(math.prod(p.shape[:-2]) * sum(p.shape[-2:]) for p in inner)
    passed_numbers += sum(3 * p.numel() for p in trained if p.dim() == 1)
    read = work.num_tokens * (
        text.hidden_size * (len(learner.captured_taps) + FORWARD_COPIES) + 2 * _feed_forward(text)
    )
    chunk = min(work.chunk or work.num_tokens, work.num_tokens)
    # Each guess is a call of its own, whose gradients go before those of the next come.
    at_once = guessed // getattr(learner, "num_guesses", 1)
    kept = guessed + at_once if worth_keeping(at_once, width) else 0
    states = guessed * text.hidden_size * work.activation_bytes
    products = 3 * 2 * sum(p.numel() for p in inner) * passed + 4 * 2 * text.hidden_size * width * guessed
    return TrainEstimate(
        num_trained=num_trained,
        num_frozen=num_parameters(target),
        weights=(MASTER + copies) * num_trained // work.num_shards,
        gradients=MASTER * num_trained // work.num_shards,
        optimizer=2 * MASTER * num_trained // work.num_shards,
        target=target_bytes * num_parameters(target),
        activations=passed * work.activation_bytes * passed_numbers + states + read * max(target_bytes, 2),
        logits=(LOGIT_COPIES * 4 * chunk + work.activation_bytes * kept) * width,
        flops_per_token=products / work.num_tokens + forward_flops(target, work.length),
    )


def output_layer_advice(learner: HeadObjective, needed: TrainEstimate) -> str | None:
    """What to do where the output layer takes most of what a head adds to the target; None where it does not, or where
    nothing can be done.
    """
    options, width = learner.options, _width(learner)
    if getattr(options, "draft_vocab", 0) is not None or options.init_from is not None:
        return None
    size = sum(p.numel() for p in learner.head.parameters() if p.requires_grad and width in p.shape)
    taken = needed.share(size / max(1, needed.num_trained)) + needed.logits
    if 2 * taken < needed.total - needed.target:
        return None
    return (
        f"{_size(taken)} of it are the output layer over {width:,} tokens and its logits; --draft-vocab 32000 lets the "
        "head guess the most frequent ones alone"
    )


def operations_per_second(device: torch.device, dtype: torch.dtype = torch.float32) -> float:
    """Operations a second of a matrix product on a device, the fastest of a few."""
    one, other = (torch.ones(RATE_SIZE, RATE_SIZE, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(4):
        begin = time.perf_counter()
        _wait((one @ other).device)
        seconds.append(time.perf_counter() - begin)
    return 2 * RATE_SIZE**3 / min(seconds)


def _width(learner: HeadObjective) -> int:
    """Tokens that a head can guess."""
    ids = getattr(learner.head, "ids", None)
    return learner.shape.vocab_size if ids is None else len(ids)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def skeleton(source: PreTrainedConfig | PreTrainedModel) -> PreTrainedModel:
    """A model without weights."""
    if isinstance(source, PreTrainedModel):
        return source
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(source)
    return model


def _text(model: PreTrainedModel) -> PreTrainedConfig:
    return model.config.get_text_config(decoder=True)


def _experts(text: PreTrainedConfig) -> tuple[int, int]:
    """Number of experts, and how many of them a token goes through; one of each without a mixture."""
    number = next((int(value) for name in EXPERTS if (value := getattr(text, name, None))), 1)
    return number, int(getattr(text, "num_experts_per_tok", None) or 1) if number > 1 else 1


def _feed_forward(text: PreTrainedConfig) -> int:
    """Width of a feed-forward, or of an expert's."""
    number, _ = _experts(text)
    width = getattr(text, "moe_intermediate_size", None) if number > 1 else None
    size = width or getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return int(max(size) if isinstance(size, list | tuple) else size)


def _size(count: float) -> str:
    """A number of bytes for people.

    Example:
        >>> _size(950), _size(12_340_000), _size(16.1e9)
        ('950 B', '12.3 MB', '16.1 GB')
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"
