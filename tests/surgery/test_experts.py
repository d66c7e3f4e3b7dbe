"""Experts are merged or chosen as the papers say; models that cannot be pruned are refused in a sentence."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from outrider.core.types import InputError
from outrider.surgery.checkpoint import write
from outrider.surgery.clusters import spectral_clusters
from outrider.surgery.experts import METHODS, prune_experts
from outrider.surgery.merging import Expert, alignment, merged
from outrider.surgery.mixture import find_mixtures
from outrider.surgery.routing import watch_routing
from recipes.tiny import tiny_config, tiny_model
from tests.surgery.mixtures import KINDS, gap, logits, mixture_model, some_texts, twin_experts


def random_expert(seed: int, neurons: int = 12, width: int = 5) -> Expert:
    dice = torch.Generator().manual_seed(seed)
    made = torch.randn(3 * neurons, width, generator=dice, dtype=torch.float64)
    return Expert(gate_up=made[: 2 * neurons], down=made[2 * neurons :].T.contiguous())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_as_many_experts_as_before_give_the_same_logits(kind, method):
    model = mixture_model(kind)
    pruned = prune_experts(model, some_texts(), 6, method)
    assert torch.equal(logits(pruned.model), logits(model))
    assert all(groups == [[e] for e in range(6)] for groups in pruned.origins.values())


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_the_neurons_does_not_change_the_outputs(kind):
    model, shuffled = mixture_model(kind), mixture_model(kind)
    with torch.no_grad():
        for mixture in find_mixtures(shuffled):
            for e in range(mixture.num_experts):
                order = torch.randperm(mixture.down.shape[-1], generator=torch.Generator().manual_seed(e))
                old = Expert(gate_up=mixture.gate_up[e], down=mixture.down[e])
                new = old.permuted(order)
                mixture.gate_up[e], mixture.down[e] = new.gate_up.clone(), new.down.clone()
    assert not torch.equal(find_mixtures(shuffled)[0].down, find_mixtures(model)[0].down)
    assert gap(shuffled, model) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shuffled", [False, True])
def test_equal_experts_merge_without_a_change_where_one_is_used_per_token(kind, shuffled):
    """The convention: the gate of the only expert of a token is 1, however many experts were merged into it."""
    normed = {} if kind == "mixtral" else {"norm_topk_prob": True}
    model = mixture_model(kind, experts=5, num_experts_per_tok=1, **normed)
    twin_experts(model, 1, 4, shuffled=shuffled)
    pruned = prune_experts(model, some_texts(), 4)
    assert all([1, 4] in groups for groups in pruned.origins.values())
    assert gap(pruned.model, model) < 1e-5


def test_the_gate_of_merged_experts_is_no_sum_where_gates_are_not_normalised():
    """A router has no bias that could hold the sum: the gate of the pair falls to the gate of one of its members."""
    model = mixture_model("qwen3_moe", experts=5, num_experts_per_tok=1, norm_topk_prob=False)
    twin_experts(model, 1, 4, shuffled=False)
    assert gap(prune_experts(model, some_texts(), 4).model, model) > 1e-4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_plain_transformers_loads_what_was_pruned(kind, method, tmp_path):
    model = mixture_model(kind)
    pruned = prune_experts(model, some_texts(), 3, method).model
    write(pruned, None, tmp_path / "pruned", {})
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "pruned", dtype=torch.float64, experts_implementation="eager"
    )
    assert torch.equal(logits(loaded), logits(pruned))
    assert {m.num_experts for m in find_mixtures(loaded)} == {3}
    assert loaded.config.num_experts == 3
    assert sum(p.numel() for p in loaded.parameters()) < sum(p.numel() for p in model.parameters())


def test_pruning_reads_the_model_and_leaves_it_alone():
    model = mixture_model()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    pruned = prune_experts(model, some_texts(), 2).model
    with torch.no_grad():
        for weight in pruned.parameters():
            weight.zero_()
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert model.config.num_local_experts == 6
    assert not any(m.router._forward_hooks for m in find_mixtures(model))


def test_routing_is_what_the_router_says_token_by_token():
    model, texts = mixture_model(), some_texts(3, 11)
    mixtures = find_mixtures(model)
    seen: list[list[torch.Tensor]] = [[] for _ in mixtures]
    inputs: list[list[torch.Tensor]] = [[] for _ in mixtures]

    def remember(i):
        def hook(_, given, output):
            seen[i].append(output)
            inputs[i].append(given[0])

        return hook

    hooks = [m.router.register_forward_hook(remember(i)) for i, m in enumerate(mixtures)]
    with torch.no_grad():
        for text in texts:
            model(torch.tensor([text]))
    for hook in hooks:
        hook.remove()
    for i, routing in enumerate(watch_routing(model, mixtures, texts, norms=True)):
        rows = torch.cat([out[0] for out in seen[i]]).numpy()
        usage, norms = np.zeros(6, dtype=int), [[] for _ in range(6)]
        for hidden, (_, gates, chosen) in zip(inputs[i], seen[i], strict=True):
            for token, (weights, experts) in enumerate(zip(gates.tolist(), chosen.tolist(), strict=True)):
                for weight, expert in zip(weights, experts, strict=True):
                    usage[expert] += 1
                    with torch.no_grad():
                        said = mixtures[i].output(expert, hidden.reshape(-1, 32)[token : token + 1])
                    norms[expert].append(weight * float(said.norm()))
        assert routing.num_tokens == 33
        assert routing.usage.tolist() == usage.tolist()
        assert routing.norms == pytest.approx([np.mean(each) if each else 0 for each in norms], rel=1e-5)
        assert routing.correlation == pytest.approx(np.corrcoef(rows.T), abs=1e-6)


def test_frequency_keeps_the_most_used_and_reap_the_loudest():
    model, texts = mixture_model(), some_texts()
    routings = watch_routing(model, find_mixtures(model), texts, norms=True)
    for method, scores in (("frequency", [r.usage for r in routings]), ("reap", [r.norms for r in routings])):
        found = prune_experts(model, texts, 3, method).origins.values()
        for groups, score in zip(found, scores, strict=True):
            kept = [expert for [expert] in groups]
            assert kept == sorted(kept)
            assert min(score[kept]) >= max(np.delete(score, kept))


def test_a_kept_expert_computes_what_it_computed():
    model = mixture_model()
    pruned = prune_experts(model, some_texts(), 3, "reap")
    hidden = torch.randn(7, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for old, new in zip(find_mixtures(model), find_mixtures(pruned.model), strict=True):
        for place, [origin] in enumerate(pruned.origins[old.name]):
            assert torch.equal(new.output(place, hidden), old.output(origin, hidden))
            assert torch.equal(new.rows[place], old.rows[origin])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_alignment_finds_a_permutation_again(seed):
    anchor = random_expert(seed)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
    other = anchor.permuted(order)
    back = other.permuted(alignment(anchor, other))
    assert torch.equal(back.gate_up, anchor.gate_up)
    assert torch.equal(back.down, anchor.down)


def test_merging_weights_by_usage_and_starts_from_the_most_used():
    first, second = random_expert(1), random_expert(2)
    one = merged([first, second], [1, 3])
    other = first.permuted(alignment(second, first))
    assert torch.allclose(one.gate_up, 0.25 * other.gate_up + 0.75 * second.gate_up)
    assert torch.allclose(one.down, 0.25 * other.down + 0.75 * second.down)
    assert torch.allclose(merged([first, second], [0, 0]).down, merged([first, second], [2, 2]).down)


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 9), st.data())
def test_clusters_part_all_items_and_none_is_empty(items, data):
    count = data.draw(st.integers(1, items))
    dice = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    affinity = dice.integers(0, 3, (items, items)) / 2
    affinity = np.maximum(affinity, affinity.T)
    np.fill_diagonal(affinity, 1)
    found = spectral_clusters(affinity, count, first=int(dice.integers(items)))
    assert sorted(item for cluster in found for item in cluster) == list(range(items))
    assert len(found) == count
    assert all(found)


def test_clusters_are_the_blocks_of_the_affinity():
    blocks = [[0, 3, 5], [1, 2], [4, 6]]
    affinity = np.full((7, 7), 0.05)
    for block in blocks:
        affinity[np.ix_(block, block)] = 0.9
    assert spectral_clusters(affinity, 3) == blocks


def test_fewer_experts_per_token_can_be_asked_for():
    pruned = prune_experts(mixture_model(), some_texts(), 1, experts_per_token=1).model
    assert (pruned.config.num_local_experts, pruned.config.num_experts_per_tok) == (1, 1)
    assert find_mixtures(pruned)[0].router.top_k == 1
    assert logits(pruned).isfinite().all()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_experts": 7}, "num_experts must be <= 6, the number of experts in each layer, got 7"),
        ({"num_experts": 1}, "num_experts must be >= 2, the number of experts that each token uses, got 1"),
        ({"num_experts": 3, "experts_per_token": 3}, "experts_per_token must be in 1..2, the target's number, got 3"),
        ({"num_experts": 3, "method": "reep"}, "unknown method of pruning experts 'reep'; did you mean 'reap'?"),
        ({"num_experts": 3, "texts": [[], []]}, "the text is empty"),
        ({"num_experts": 3, "texts": []}, "the text is empty"),
        ({"num_experts": 3, "texts": [[1, 64]]}, "the text has the token 64, but the model knows 64 tokens"),
    ],
)
def test_wrong_input_gets_a_sentence(options, sentence):
    with pytest.raises(InputError) as raised:
        prune_experts(**{"model": mixture_model(), "texts": some_texts(), **options})
    assert sentence in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("llama", "llama has no experts, so none can be pruned"),
        ("gpt_oss", "gpt_oss stores experts in a way unknown here"),
        ("deepseek_v3", "deepseek_v3 routes tokens to experts in a way unknown here"),
    ],
)
def test_models_without_known_experts_are_refused(kind, sentence):
    with pytest.raises(InputError, match=sentence):
        prune_experts(tiny_model(tiny_config(kind)), some_texts(), 2)


def test_merging_without_scipy_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(InputError, match=r"pip install outrider\[prune\]"):
        alignment(random_expert(1), random_expert(2))
