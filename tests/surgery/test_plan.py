"""The cost model is the paper's formula; shapes of one size differ in depth, and depth is what a draft costs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import LlamaConfig

from outrider.core.types import InputError
from outrider.embedded import EMBEDDED_TARGET
from outrider.lm.hf.open import open_config
from outrider.surgery.family import NEAR, Sized, same_size
from outrider.surgery.plan import LONGEST_DRAFT, Speeds, Trial, plan, prospects, random_draft, tokens_per_step
from outrider.surgery.shape import ModelShape, config_of, num_parameters, shape_of
from recipes.tiny import tiny_config, tiny_model

SHALLOW = ModelShape(layers=1, width=32, heads=4, key_value_heads=2, feed_forward=48)


@given(st.floats(0, 0.99), st.integers(0, LONGEST_DRAFT))
def test_tokens_per_step_is_the_closed_form(alpha, length):
    assert tokens_per_step(alpha, length) == pytest.approx((1 - alpha ** (length + 1)) / (1 - alpha))


@settings(deadline=None)
@given(st.floats(0, 1), st.floats(1e-4, 1), st.floats(0, 0.1))
def test_the_best_length_is_the_best_of_all(alpha, draft, slope):
    speeds = Speeds(target={1: 1.0, 17: 1.0 + 16 * slope}, draft=draft)
    rates = [sum(alpha**d for d in range(k + 1)) / (1 + slope * k + k * draft) for k in range(LONGEST_DRAFT + 1)]
    assert speeds.tokens_per_second(alpha, speeds.best_length(alpha)) == pytest.approx(max(rates))
    assert speeds.speedup(alpha, 0) == 1


@settings(max_examples=20, deadline=None)
@given(st.floats(0.05, 0.95), st.floats(0.01, 0.5))
def test_the_needed_acceptance_reaches_the_speed_and_less_does_not(alpha, draft):
    fast = Speeds(target={1: 1.0}, draft=draft / 2)
    slow = Speeds(target={1: 1.0}, draft=draft)
    speed = fast.tokens_per_second(alpha, fast.best_length(alpha))
    needed = slow.needed(speed)
    assert needed is None or slow.tokens_per_second(needed, slow.best_length(needed)) >= speed * (1 - 1e-9)
    if needed is not None and needed > 0.02:
        less = needed - 0.01
        assert slow.tokens_per_second(less, slow.best_length(less)) < speed


def test_verifying_costs_what_was_timed_and_lines_between():
    speeds = Speeds(target={1: 2.0, 5: 4.0, 9: 5.0}, draft=1.0)
    assert [speeds.verify(n) for n in (1, 3, 5, 7, 9, 13)] == [2.0, 3.0, 4.0, 4.5, 5.0, 6.0]


def test_a_deeper_shape_is_worth_it_only_if_it_is_accepted_oftener():
    deep = ModelShape(layers=4, width=16, heads=2, key_value_heads=1, feed_forward=24)
    family = [Sized(shape=SHALLOW, num_parameters=100), Sized(shape=deep, num_parameters=100)]
    equal = prospects(family, [0.7, 0.7], {1: 1.0, 17: 1.2}, [0.05, 0.2])
    assert [each.shape for each in equal] == [SHALLOW, deep]
    assert equal[0].needed == pytest.approx(0.7)
    assert equal[1].needed > 0.7
    better = prospects(family, [0.7, equal[1].needed + 0.02], {1: 1.0, 17: 1.2}, [0.05, 0.2])
    assert [each.shape for each in better] == [deep, SHALLOW]


def test_drafting_that_does_not_pay_has_length_zero():
    [only] = prospects([Sized(shape=SHALLOW, num_parameters=1)], [0.3], {1: 1.0}, [2.0])
    assert (only.length, only.speedup) == (0, 1.0)


@pytest.mark.parametrize("parameters", [3_000_000, 4_000_000])
def test_a_family_has_one_size_and_falls_in_width_with_depth(parameters):
    config = open_config(str(EMBEDDED_TARGET))
    family = same_size(config, parameters, [1, 2, 4, 8])
    assert [sized.shape.layers for sized in family] == [1, 2, 4, 8]
    assert [s.shape.width for s in family] == sorted((s.shape.width for s in family), reverse=True)
    for sized in family:
        assert sized.num_parameters == num_parameters(config_of(config, sized.shape))
        assert abs(sized.num_parameters - parameters) <= NEAR * parameters


def test_every_shape_of_a_family_has_a_width_that_its_heads_divide():
    # The sizes of SmolLM2-135M, whose nine heads on three do not divide every multiple of 16.
    sizes = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536}
    config = LlamaConfig(vocab_size=1000, num_hidden_layers=30, head_dim=64, **sizes)
    for parameters in (3_000_000, 4_000_000):
        for sized in same_size(config, parameters, [1, 2, 4, 12]):
            assert sized.shape.width % sized.shape.heads == 0
            LlamaConfig(**config_of(config, sized.shape).to_dict())


def test_the_number_of_parameters_is_the_models_own():
    for kind in ("llama", "qwen3", "gemma3_text", "mixtral"):
        config = tiny_config(kind)
        assert num_parameters(config) == sum(p.numel() for p in tiny_model(config).parameters())


def test_a_draft_forward_calls_fewer_layers_the_shallower_its_shape_is():
    config = open_config(str(EMBEDDED_TARGET))
    calls = []
    for sized in same_size(config, 3_000_000, [1, 2, 4]):
        model = random_draft(config, sized.shape, torch.float32, torch.device("cpu"))
        forward = Trial.of(model, context=8).forward(1)
        seen: list[str] = []
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(lambda *_, seen=seen: seen.append("linear"))
        forward()
        calls.append(len(seen))
    assert calls == [7 * layers + 1 for layers in (1, 2, 4)]


def test_a_plan_times_every_shape_and_sorts_by_speed():
    target = tiny_model(tiny_config("llama")).float()
    before = shape_of(target.config)
    shapes = [SHALLOW, ModelShape(layers=3, width=16, heads=2, key_value_heads=2, feed_forward=24)]
    family = [Sized(shape=s, num_parameters=num_parameters(config_of(target.config, s))) for s in shapes]
    found = plan(target, family, [0.6, 0.7], context=8, rounds=2)
    assert {each.shape for each in found} == set(shapes)
    assert [e.tokens_per_second for e in found] == sorted((e.tokens_per_second for e in found), reverse=True)
    assert all(each.draft_seconds > 0 for each in found)
    assert found[0].needed == pytest.approx(found[0].alpha, abs=1e-6) or found[0].length == 0
    assert shape_of(target.config) == before


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda c: same_size(c, 3_000_000, [13]), "layers must be in 1..12, what the target has, got 13"),
        (lambda c: same_size(c, 50_000_000, [1]), "no shape has about 50,000,000 parameters and fits into the target"),
        (lambda c: prospects([], [0.5], {1: 1.0}, []), "there are 0 shapes and 1 values of alpha"),
        (
            lambda c: prospects([Sized(shape=SHALLOW, num_parameters=1)], [1.5], {1: 1.0}, [1.0]),
            "alpha must be in 0..1",
        ),
    ],
)
def test_wrong_plans_get_a_sentence(call, sentence):
    with pytest.raises(InputError) as raised:
        call(open_config(str(EMBEDDED_TARGET)))
    assert sentence in str(raised.value)
