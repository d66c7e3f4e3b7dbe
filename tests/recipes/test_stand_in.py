"""The stand-in says what the embedded target says; its measurements run and add up."""

import json
import statistics

import pytest
import torch

import outrider
from outrider import InputError, Sampling
from outrider.embedded import EMBEDDED_DRAFT, EMBEDDED_TARGET
from outrider.lm.hf.open import open_model
from recipes import overhead, stand_in

TEXT = "Once upon a time, there was a little fox who lived near a quiet river. One day, the fox found a red kite."


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A stand-in of 30 million parameters."""
    return stand_in.build(tmp_path_factory.mktemp("stand_in"), 30_000_000)


def logits(place: str, dtype: str) -> torch.Tensor:
    model = open_model(place, dtype=dtype, device="cpu")
    tokens = torch.tensor([outrider.load().encode(TEXT)])
    with torch.no_grad():
        return model(tokens).logits[0].double()


@pytest.mark.parametrize(("dtype", "close"), [("float64", 1e-12), ("float32", 1e-5), ("bfloat16", 2e-2)])
def test_the_stand_in_computes_the_embedded_target(place, dtype, close):
    ours, theirs = logits(str(place), dtype), logits(str(EMBEDDED_TARGET), dtype)
    span = float(theirs.max() - theirs.min())
    assert float((ours - theirs).abs().max()) < close * span
    if dtype != "bfloat16":
        assert (ours.argmax(-1) == theirs.argmax(-1)).all()


def test_the_stand_in_costs_its_parameters_and_loads_with_its_tokenizer(place):
    model = open_model(str(place), device="cpu")
    assert stand_in.num_parameters(model) == pytest.approx(30e6, rel=0.02)
    assert all(float(layer.mlp.gate_proj.weight.detach()[896:].float().std()) > 0.01 for layer in model.model.layers)
    engine = outrider.load(place, drafter=f"model:path={EMBEDDED_DRAFT}", length="fixed:4", dtype="float32")
    own = outrider.load(length="fixed:4", dtype="float32")
    greedy = Sampling(temperature=0)
    [ours], [theirs] = (e.generate([TEXT], max_new_tokens=12, sampling=greedy) for e in (engine, own))
    assert ours.tokens == theirs.tokens


def test_fewer_parameters_than_there_are_cannot_be_had():
    with pytest.raises(InputError, match="at least the 15"):
        stand_in.width_for(open_model(str(EMBEDDED_TARGET), device="cpu"), 10_000_000)


def test_overhead_is_what_the_rows_say(tmp_path):
    plan = overhead.Plan(
        out=tmp_path / "out",
        batch_sizes="1,2",
        context=16,
        steps=3,
        repeats=1,
        contexts="12",
        new_tokens=3,
        parameters=17_000_000,
        threads=1,
    )
    summary = overhead.run(plan, pairs=("stand-in",))
    made = [json.loads(line) for line in (plan.out / "rows.jsonl").read_text().splitlines()]
    steps, decoding = (
        [r for row in made if ("steps" in row["turn"]) == wanted for r in row["each"]] for wanted in (1, 0)
    )
    assert [each["batch"] for each in summary["steps"]] == [1, 2]
    for each in summary["steps"]:
        own = [row for row in steps if row["batch"] == each["batch"]]
        assert 0 < len(own) <= 3
        middle = statistics.median(1 - row["bare"] / row["step"] for row in own)
        assert each["overhead"]["median"] == pytest.approx(middle)
        calls = each["v"] + each["c"] * overhead.GAMMA
        plain = each["seconds"][each["plain"]]["median"] / each["seconds"]["step"]["median"]
        assert each["efficiency"] == pytest.approx(plain * calls)
    [one, two] = summary["decoding"]
    assert (one["batch"], two["batch"]) == (1, 2)
    timed = [row for row in decoding if row["batch"] == 2]
    assert len(timed) == 2 * 3
    many = [row["seconds"] for row in timed if row["way"] == "transformers" and row["tokens"] == 6]
    assert two["tokens_per_second"]["transformers"] == pytest.approx(6 / statistics.median(many))
    assert "The stand-in's costs are synthetic" in (plan.out / "table.md").read_text()


def test_wrong_plans_are_refused(tmp_path):
    with pytest.raises(InputError, match="unknown forward 'fast'"):
        overhead.Plan(out=tmp_path, forward="fast")
    with pytest.raises(InputError, match="new_tokens must be >= 2, got 1"):
        overhead.Plan(out=tmp_path, new_tokens=1)
