"""The memory that is estimated is the memory that torch takes, and the hours follow from the operations."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3Config

from outrider.core.types import InputError
from outrider.training.estimate import Work, activations_per_token, estimate, forward_flops, num_parameters, trial
from tests.world.zoo import tiny_config

ROWS, LENGTH = 3, 40


def model_of(name: str, attention: str = "sdpa") -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(tiny_config(name), attn_implementation=attention).train()


def loss_of(model: PreTrainedModel) -> torch.Tensor:
    """The mean of the last layer's states: everything below the output layer."""
    tokens = torch.randint(3, 30, (ROWS, LENGTH))
    return model.base_model(input_ids=tokens, use_cache=False).last_hidden_state.square().mean()


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "phi3"])
def test_activations_are_those_that_torch_saves(name: str) -> None:
    model = model_of(name)
    done = trial(lambda: loss_of(model), list(model.parameters()), num_tokens=ROWS * LENGTH, rounds=1)
    estimated = 4 * ROWS * LENGTH * activations_per_token(model)
    assert estimated == pytest.approx(done.saved_bytes, rel=0.2), (name, estimated, done.saved_bytes)


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


def test_a_trial_changes_nothing_and_counts_its_tokens() -> None:
    model = model_of("llama")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    calls: list[int] = []

    def loss() -> torch.Tensor:
        calls.append(1)
        return loss_of(model)

    done = trial(loss, list(model.parameters()), num_tokens=ROWS * LENGTH, rounds=3)
    assert len(calls) == 4
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert done.hours_per_million == pytest.approx(done.seconds / 120 * 1e6 / 3600)
    found = estimate(model, None, Work(rows=ROWS, length=LENGTH))
    assert found.hours_per_million(done.flops_per_second(found)) == pytest.approx(done.hours_per_million)
    assert "hours per million tokens on this machine" in str(done)
    with pytest.raises(InputError, match="rows must be >= 1, got 0"):
        Work(rows=0, length=4)
