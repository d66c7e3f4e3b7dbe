"""Tables and flags of other engines, and rooflines."""

import json
import shlex
from itertools import pairwise

import pytest

from outrider.core.types import InputError
from outrider.lengths.costs import CostTable
from outrider.plan.exports import exported
from outrider.plan.prediction import Planner
from outrider.plan.roofline import DEVICES, Weights, device_of, estimated
from outrider.plan.verdict import Advice
from outrider.plan.ways import DraftConfiguration
from tests.plan.test_prediction import example
from tests.world.models import engine


def advice(costs: CostTable, drafter: str = "ngram") -> Advice:
    record = example(0.8)
    record = type(record)(texts=record.texts, drafts={drafter: record.drafts["model"]}, temperature=1.0)
    ways = [
        DraftConfiguration(),
        *(DraftConfiguration(drafter=drafter, verifier="match", length=n, widths=(1,) * n) for n in range(1, 9)),
    ]
    return Advice.of(Planner(record=record, costs={drafter: costs}), ways, [1, 4, 8])


def by_load(requests: int, length: int) -> float:
    """Drafts cost little for one request and much for eight."""
    return 1.0 + 0.02 * length * requests**2


def test_vllm_gets_a_length_for_every_batch_size():
    found = advice(CostTable.of_formula(by_load))
    flag, text = shlex.split(exported(found, "vllm"))
    config = json.loads(text)
    assert flag == "--speculative-config"
    assert config["method"] == "ngram"
    ranges = config["num_speculative_tokens_per_batch_size"]
    assert ranges[0][0] == 1
    assert all(after[0] == before[1] + 1 for before, after in pairwise(ranges))
    assert ranges[-1][1:] == [8, 0]
    lengths = [length for _, _, length in ranges]
    assert lengths == sorted(lengths, reverse=True)
    assert config["num_speculative_tokens"] == max(lengths) > 0


def test_sglang_and_llama_get_flags():
    found = advice(CostTable.of_formula(by_load), "model:path=org/draft")
    length = found.chosen(1).way.length
    assert exported(found, "sglang") == (
        "--speculative-algorithm STANDALONE --speculative-draft-model-path org/draft "
        f"--speculative-num-steps {length} --speculative-eagle-topk 1 --speculative-num-draft-tokens {length + 1}"
    )
    assert exported(found, "llama.cpp") == f"-md org/draft --spec-type draft-simple --spec-draft-n-max {length}"


def test_what_should_not_speculate_gets_nothing():
    assert exported(advice(CostTable.of_formula(lambda b, n: 1.0 + n)), "vllm") == ""


def test_an_engine_without_the_drafter_is_refused():
    with pytest.raises(InputError, match="sglang has no drafter like 'suffix'"):
        exported(advice(CostTable.of_formula(by_load), "suffix"), "sglang")


def test_a_forward_is_bound_by_memory_and_then_by_arithmetic():
    weights, device = Weights(dense=8_000_000_000, layers=32), DEVICES["h100"]
    read = 2 * 8e9 / (0.7 * device.bandwidth) + 32 * 10e-6
    assert weights.seconds(device, 1) == pytest.approx(read)
    assert weights.seconds(device, 64) == pytest.approx(read)
    assert weights.seconds(device, 4096) > 5 * read


def test_more_tokens_read_more_experts():
    weights, device = Weights(dense=10**9, experts=10**11, num_experts=64, per_token=4), DEVICES["h100"]
    times = [weights.seconds(device, n) for n in (1, 2, 8, 64)]
    assert times == sorted(times)
    assert times[3] > 5 * times[0]


def test_the_roofline_of_a_pair_is_a_table():
    parts = engine("model").parts
    table = estimated(parts, parts.drafter, device_of("H100"))
    steps = table.steps(1, sampled=True, context=64, longest=4)
    assert 0 < steps[0][0] < steps[1][1] < steps[1][4]
    weights = Weights.of(parts.target.modules)
    assert weights.dense == sum(each.numel() for m in parts.target.modules.values() for each in m.parameters())
    assert weights.layers == 2
    assert weights.kept == 2 * 2 * 2 * 8


def test_another_machine_is_refused_by_name():
    with pytest.raises(InputError, match="did you mean 'h100'"):
        device_of("h10")
