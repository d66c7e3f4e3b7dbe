"""The memory that is estimated is the memory that torch takes, and the hours follow from the operations."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config

from outrider.catalog import rows
from outrider.core.types import InputError
from outrider.heads.objective import HeadContext
from outrider.learning.batch import Document
from outrider.training.data.batches import Batches
from outrider.training.estimate import (
    LOGIT_COPIES,
    Work,
    activations_per_token,
    estimate,
    forward_flops,
    head_estimate,
    num_parameters,
    output_layer_advice,
    skeleton,
)
from tests.world.zoo import tiny_config

ROWS, LENGTH = 3, 40


def model_of(name: str, attention: str = "sdpa") -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(tiny_config(name), attn_implementation=attention).train()


def with_vocabulary(size: int) -> PreTrainedConfig:
    config = tiny_config("llama")
    config.vocab_size = size
    return config


def saved_bytes(loss: Callable[[], torch.Tensor], weights: Sequence[torch.Tensor]) -> int:
    """Bytes of the tensors that torch keeps for the backward pass, without the weights."""
    kept: dict[int, torch.Tensor] = {}
    own = {weight.untyped_storage()._cdata for weight in weights}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage()._cdata not in own:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def loss_of(model: PreTrainedModel) -> torch.Tensor:
    """The mean of the last layer's states: everything below the output layer."""
    tokens = torch.randint(3, 30, (ROWS, LENGTH))
    return model.base_model(input_ids=tokens, use_cache=False).last_hidden_state.square().mean()


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "phi3"])
def test_activations_are_those_that_torch_saves(name: str) -> None:
    model = model_of(name)
    saved = saved_bytes(lambda: loss_of(model), list(model.parameters()))
    estimated = 4 * ROWS * LENGTH * activations_per_token(model)
    assert estimated == pytest.approx(saved, rel=0.2), (name, estimated, saved)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "mixtral", "gpt2"])
def test_weights_gradients_and_optimizer_are_counted_exactly(name: str) -> None:
    model = model_of(name)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model(input_ids=torch.randint(3, 30, (2, 9))).logits.square().mean().backward()
    optimizer.step()
    found = estimate(tiny_config(name), tiny_config("llama"), Work(rows=2, length=9, num_shards=1))
    weights = [parameter for parameter in model.parameters() if parameter.grad is not None]
    assert len(weights) == len(list(model.parameters()))
    moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    assert found.weights == sum(parameter.nbytes for parameter in weights)
    assert found.gradients == sum(parameter.grad.nbytes for parameter in weights if parameter.grad is not None)
    assert found.optimizer == sum(moment.nbytes for moment in moments)
    assert found.target == 2 * num_parameters(model_of("llama"))
    assert found.logits == 6 * 4 * 18 * model.config.vocab_size
    shared = estimate(tiny_config(name), None, Work(rows=2, length=9, num_shards=2, activation_bytes=2, chunk=5))
    assert (shared.weights, shared.optimizer) == (found.weights * 3 // 4, found.optimizer // 2)
    # So few logits stay until the backward: those of the other chunks, in half precision.
    assert (shared.target, shared.logits) == (0, (6 * 4 * 5 + 2 * 2 * 13) * model.config.vocab_size)
    large = estimate(tiny_config(name), None, Work(rows=1 << 10, length=1 << 12, chunk=5))
    assert large.logits == 6 * 4 * 5 * model.config.vocab_size
    assert shared.activations == found.activations // 2


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "phi3", "gpt_neox"])
def test_operations_are_those_that_torch_counts(name: str) -> None:
    # torch does not count the products of the fused attention on a CPU.
    model = model_of(name, attention="eager")
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model(input_ids=torch.randint(3, 30, (ROWS, LENGTH)), use_cache=False)
    # torch counts the attention of every pair of tokens, and half of them see each other.
    text = model.config
    pairs = 2 * text.num_attention_heads * (getattr(text, "head_dim", None) or 8) * LENGTH * text.num_hidden_layers
    estimated = ROWS * LENGTH * (forward_flops(model, LENGTH) + pairs)
    assert estimated == pytest.approx(counted.get_total_flops(), rel=0.05), (name, estimated, counted.get_total_flops())


def test_of_experts_only_the_chosen_share_counts() -> None:
    dense, mixture = model_of("mistral"), model_of("mixtral")
    one_expert = 2 * 2 * 3 * 32 * 48  # Layers, operations, matrices, and their sizes.
    router = 2 * 2 * 32 * 4
    assert forward_flops(mixture, 1) == pytest.approx(forward_flops(dense, 1) + one_expert + router)


def test_an_8b_target_is_planned_from_configs_alone() -> None:
    llama = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    draft = Qwen3Config(
        vocab_size=128256,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )
    found = estimate(draft, llama, Work(rows=4, length=2048, chunk=1024, activation_bytes=2))
    assert found.num_frozen == 8_030_261_248
    assert found.target == 2 * found.num_frozen
    assert 15e9 < found.flops_per_token < 19e9
    assert 1e9 < found.activations < 3e9
    assert found.hours_per_million(1e14) == pytest.approx(found.flops_per_token * 1e6 / 1e14 / 3600)
    assert "8,030,261,248 of the target; about 2" in str(found)


@pytest.mark.parametrize("name", ["eagle3", "eagle", "parallel", "medusa", "blockwise", "dflash", "jetspec"])
def test_a_head_keeps_what_was_estimated_from_a_model_without_weights(name: str) -> None:
    spec, config = rows("drafter")[name].kind, with_vocabulary(600)
    documents = [Document(tokens=np.arange(3, 3 + LENGTH), start=2) for _ in range(ROWS)]
    with torch.device("meta"):
        there = skeleton(config).eval()
        context = HeadContext(target=there, documents=documents, max_length=LENGTH, device=torch.device("meta"))
        without = spec.learner(spec.options(), context)
    assert {parameter.device.type for parameter in without.parameters()} == {"meta"}
    found = head_estimate(without, there, Work(rows=ROWS, length=LENGTH), target_bytes=4)

    target = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    learner = spec.learner(spec.options(), HeadContext(target=target, documents=documents, max_length=LENGTH))
    assert found.num_trained == sum(p.numel() for p in learner.head.parameters() if p.requires_grad)
    batch = Batches(documents, batch_size=ROWS, max_length=LENGTH, seed=0).batch(0)
    saved = saved_bytes(lambda: learner(batch).total, [*learner.parameters(), *target.parameters()])
    # Copies of a chunk of logits come and go, and are not saved.
    kept = found.activations + found.logits - LOGIT_COPIES * 4 * ROWS * LENGTH * 600
    assert saved / 2 < kept < 2.5 * saved, (name, kept, saved)


def test_where_the_output_layer_takes_most_of_the_memory_draft_vocab_is_named() -> None:
    spec = rows("drafter")["eagle3"].kind
    for vocabulary, named in ((600, False), (150_000, True)):
        with torch.device("meta"):
            target = skeleton(with_vocabulary(vocabulary)).eval()
            learner = spec.learner(spec.options(), HeadContext(target=target, device=torch.device("meta")))
        found = head_estimate(learner, target, Work(rows=1, length=64), target_bytes=4)
        assert ("--draft-vocab" in (output_layer_advice(learner, found) or "")) == named


def test_work_of_no_rows_is_refused() -> None:
    with pytest.raises(InputError, match="rows must be >= 1, got 0"):
        Work(rows=0, length=4)
