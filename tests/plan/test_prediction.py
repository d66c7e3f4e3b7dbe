"""Predicted tokens per step are those of enumerated runs; a wrong record is not; intervals, ranking and advice."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

import outrider
from outrider import Sampling
from outrider.core.types import InputError, Step, Timing
from outrider.decoding.protocol import Parts
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.lengths.costs import CostTable
from outrider.lm.tabular import TabularLM, random_rows
from outrider.plan.prediction import Planner, PlanPrediction, Range, acceptance_for, expected_steps, ranked
from outrider.plan.record import DraftRows, RecordedRun, TargetText
from outrider.plan.recording import Continuation, along, record, slowness_of
from outrider.plan.tree_coverage import Ranked
from outrider.plan.verdict import Advice
from outrider.plan.ways import DraftConfiguration, best_tree, ways_of
from outrider.proof.enumerate import law
from outrider.trees.fixed import FixedTree
from outrider.trees.gumbel import GumbelTree
from outrider.trees.iid import IidTree
from outrider.trees.top_plus_one import TopPlusOneTree
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.coupled import CoupledVerifier
from outrider.verifiers.kseq import KseqVerifier
from outrider.verifiers.match import MatchVerifier
from outrider.verifiers.recursive import RecursiveVerifier
from outrider.verifiers.token import TokenVerifier
from outrider.verifiers.top_plus_one import TopPlusOneVerifier
from tests.world.tables import tables

VOCAB, COUNT = 3, 3
SAMPLED = Sampling(temperature=1.0, seed=0)


def recorded(parts: Parts, temperature: float = 1.0, wrong: float | None = None) -> list[tuple[float, RecordedRun]]:
    """Every text that the target can say after the prompt [0], with its probability and its record."""
    texts = list(product(range(VOCAB), repeat=COUNT))
    if temperature == 0:
        text: tuple[int, ...] = ()
        for _ in range(COUNT):
            text = (*text, int(np.argmax(parts.target._row((0, *text)))))
        texts = [text]
    said = [
        Continuation(
            prompt=(0,), text=TargetText(prompt=1, tokens=np.array(text), log_probs=np.zeros(COUNT), ended=False)
        )
        for text in texts
    ]
    sampling = Sampling(temperature=temperature)
    found = along(parts, parts.drafter, said, sampling, 2, draft_sampling=wrong and Sampling(temperature=wrong))
    return [
        (
            float(np.exp(log_p.sum())),
            RecordedRun(
                texts=(replace(each.text, log_probs=log_p),), drafts={"model": (rows,)}, temperature=temperature
            ),
        )
        for each, (log_p, rows) in zip(said, found, strict=True)
    ]


def predicted(records: list[tuple[float, RecordedRun]], way: DraftConfiguration) -> float:
    """Expected steps of an output."""
    return sum(mass * sum(each.by_length.sum() for each in expected_steps(record, way)) for mass, record in records)


def enumerated(parts: Parts) -> float:
    """Expected steps of an output of the production loop."""
    after = [law(parts, [0], steps, horizon=COUNT).emitted for steps in range(COUNT + 1)]
    return sum(mass for emitted in after for output, mass in emitted.items() if len(output) < COUNT)


RULES = {
    "token": (TokenVerifier(), None),
    "block": (BlockVerifier(), None),
    "match": (MatchVerifier(), None),
    "recursive": (RecursiveVerifier(), GumbelTree(branching=(2, 1))),
    "iid": (RecursiveVerifier(), IidTree(num_paths=2)),
    "kseq": (KseqVerifier(), IidTree(num_paths=2)),
    "top_plus_one": (TopPlusOneVerifier(), TopPlusOneTree(width=2)),
    "ranks": (MatchVerifier(), FixedTree(children=(2, 0, 1), chosen=True)),
}


def way_of(rule: str) -> DraftConfiguration:
    if rule == "ranks":
        ranked_tree = Ranked(children=(2, 0, 1))
        assert ranked_tree.widths == (2, 1)
        return DraftConfiguration(
            drafter="model", verifier="match", length=2, widths=(2, 1), kind=("ranks", ranked_tree)
        )
    tree = {"recursive": "gumbel:2x1", "iid": "iid:2", "kseq": "iid:2", "top_plus_one": "top_plus_one:2"}.get(rule)
    verifier = "recursive" if rule == "iid" else rule
    drafter = ModelDrafter(lm=TabularLM(random_rows(VOCAB, 7), VOCAB))
    found = [
        way
        for way in ways_of("model", drafter, lengths=(2,))
        if way.verifier == verifier and way.tree == (tree or "chain") and way.length == 2
    ]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("rule", RULES)
def test_steps_of_exact_kinds_are_those_of_enumerated_runs(rule):
    verifier, tree = RULES[rule]
    parts = tables(VOCAB, verifier, 2, seed=3, tree=tree)
    assert predicted(recorded(parts), way_of(rule)) == pytest.approx(enumerated(parts), abs=1e-9)


def test_coupled_chains_accept_what_rows_that_share_noise_accept():
    p, q = random_rows(VOCAB, 3)((0,)), random_rows(VOCAB, 103)((0,))
    parts = tables(VOCAB, CoupledVerifier(), 2, seed=3)
    records = recorded(parts)
    rng = np.random.default_rng(0)
    noise = rng.gumbel(size=(200_000, VOCAB))
    both = ((np.log(p) + noise).argmax(1) == (np.log(q) + noise).argmax(1)).mean()
    mine = sum(mass * record.drafts["model"][0].coupled[0, 0] for mass, record in records)
    assert mine == pytest.approx(both, abs=0.005)


def test_greedy_steps_are_those_of_the_enumerated_run():
    parts = tables(VOCAB, BlockVerifier(), 2, seed=3)
    [(mass, record)] = recorded(parts, temperature=0.0)
    assert mass == 1.0
    way = way_of("block")
    greedy = law(parts, [0], COUNT, horizon=COUNT, sampling=Sampling(temperature=0)).emitted
    assert tuple(record.texts[0].tokens.tolist()) in {tuple(output) for output in greedy}
    counts = [
        law(parts, [0], steps, horizon=COUNT, sampling=Sampling(temperature=0)).emitted for steps in range(COUNT + 1)
    ]
    steps = sum(mass for emitted in counts for output, mass in emitted.items() if len(output) < COUNT)
    assert predicted([(1.0, record)], way) == pytest.approx(steps, abs=1e-9)


def test_rows_of_a_wrong_temperature_do_not_pass():
    parts = tables(VOCAB, TokenVerifier(), 2, seed=3)
    way, true = way_of("token"), enumerated(parts)
    wrong = predicted(recorded(parts, wrong=0.3), way)
    assert abs(wrong / true - 1) > 0.05


def example(acceptance: float, texts: int = 8, count: int = 20) -> RecordedRun:
    """Texts of which each token is drafted with the same probability."""
    rows = DraftRows(
        pure=True,
        log_probs=np.log(np.full((count, 1), acceptance)),
        coupled=np.full((count, 1), acceptance),
        guesses=np.full(count, 8),
    )
    text = TargetText(prompt=4, tokens=np.arange(count), log_probs=np.zeros(count), ended=False)
    return RecordedRun(texts=(text,) * texts, drafts={"model": (rows,) * texts}, temperature=1.0)


def chains(lengths=range(1, 9)) -> list[DraftConfiguration]:
    return [
        DraftConfiguration(),
        *(DraftConfiguration(drafter="model", verifier="match", length=n, widths=(1,) * n) for n in lengths),
    ]


CHEAP = CostTable.of_formula(lambda requests, length: 1.0 + 0.1 * length)
DEAR = CostTable.of_formula(lambda requests, length: 1.0 + length)


def leave_steps(way: DraftConfiguration) -> np.ndarray:
    """Steps of one example text by the length of their drafts."""
    return expected_steps(example(0.8), way)[0].by_length


def test_cheap_drafts_are_used_and_dear_ones_are_not():
    use = Advice.of(Planner(record=example(0.8), costs={"model": CHEAP}), chains(), [1])
    assert not use.chosen(1).way.is_plain
    assert use.sentence().startswith("Use model, chain of ")
    leave = Advice.of(Planner(record=example(0.8), costs={"model": DEAR}), chains(), [1])
    assert leave.chosen(1).way.is_plain
    assert leave.sentence().startswith("Do not speculate")
    nearest = leave.by_requests[1][1]
    assert nearest.way.length == 1
    assert f"breaks even at {nearest.break_even:.2f} tokens per step" in leave.sentence()
    # The last step of a text has no room for a draft and costs half as much as the others.
    steps = leave_steps(nearest.way)
    assert nearest.break_even == pytest.approx(2.0 - 1.0 * steps[0] / steps.sum())


def test_what_seems_equal_is_decided_for_the_simpler_way():
    planner = Planner(record=example(0.001), costs={"model": CostTable.of_formula(lambda b, n: 1.0)})
    found = ranked([planner.predict(way, 1) for way in reversed(chains())])
    assert found[0].way.is_plain


def test_a_tree_whose_times_were_not_measured_is_not_advised():
    planner = Planner(record=example(0.8), costs={"model": CHEAP})
    made = [planner.predict(way, 1) for way in chains()]
    best = ranked(made)[0]
    tree = replace(best, way=replace(best.way, tree="iid:2"), speedup=Range(value=9.0, low=8.0, high=10.0), timed=False)
    found = ranked([tree, *made])
    assert found[0].way == best.way
    assert found[1] == tree


def test_identical_prompts_leave_only_the_error_of_the_times():
    tau = Planner(record=example(0.8), costs={"model": CHEAP}).predict(chains()[4], 2).block_efficiency
    assert tau.low == pytest.approx(tau.value, abs=1e-12)
    assert tau.high == pytest.approx(tau.value, abs=1e-12)


def test_the_longest_draft_of_a_batch_decides():
    guesses = np.array([8, 0] * 10)
    rows = replace(example(1e-9).drafts["model"][0], guesses=guesses)
    record = replace(example(1e-9), drafts={"model": (rows,) * 8})
    planner = Planner(record=record, costs={"model": DEAR})
    way = chains()[1]
    alone, many = planner.predict(way, 1), planner.predict(way, 8)
    assert alone.seconds == pytest.approx(1.5, abs=0.1)
    assert many.seconds == pytest.approx(2.0, abs=0.02)


def test_the_break_even_acceptance_gives_the_break_even_tokens():
    a = acceptance_for(2.2, 4)
    assert sum(a**i for i in range(5)) == pytest.approx(2.2, abs=1e-4)


def test_a_record_is_read_back(tmp_path):
    record = replace(example(0.5), header={"prompts": "abc"}, slowness=1.25)
    record.save(tmp_path / "run.npz")
    again = RecordedRun.read(tmp_path / "run.npz")
    assert again.header == record.header
    assert again.slowness == record.slowness
    way = chains()[3]
    planners = [Planner(record=each, costs={"model": CHEAP}) for each in (record, again)]
    assert planners[0].predict(way, 1) == planners[1].predict(way, 1)


def test_times_are_the_mean_of_all_measurements_and_as_wide_as_these_differ():
    fast, slow = (CostTable.of_formula(lambda b, n, s=s: s * (1.0 + 0.1 * n)) for s in (1.0, 4.0))
    slower = replace(example(0.5), slowness=4.0)
    alone = Planner(record=slower, costs={"model": fast})
    assert alone.slowness == pytest.approx(2.0)
    assert alone.unsteady == pytest.approx(np.log([1.0, 4.0]).std(ddof=1))
    assert alone.predict(DraftConfiguration(), 1).tokens_per_second.value == pytest.approx(0.5)
    same = Planner(record=example(0.5), costs={"model": fast, "suffix": fast})
    assert (same.slowness, same.unsteady) == pytest.approx((1.0, 0.0))
    both = Planner(record=replace(example(0.5), slowness=1.0), costs={"model": fast, "suffix": slow})
    # Plain steps are the median of both tables.
    assert both.plain_seconds(1) == pytest.approx(2.5)
    assert both.predict(DraftConfiguration(), 1).tokens_per_second.value == pytest.approx(1 / (4.0 * 2.5) ** (1 / 3))
    assert both.predict(chains()[3], 1).speedup.value == pytest.approx(same.predict(chains()[3], 1).speedup.value)


def test_the_doubt_of_costs_widens_speedups_and_an_unsteady_machine_widens_speeds():
    def predicted(**more: float) -> PlanPrediction:
        return Planner(record=example(0.5), costs={"model": replace(CHEAP, **more)}).predict(chains()[3], 1)

    usual, doubtful, unsteady = predicted(), predicted(doubt=0.2), predicted(unsteady=0.3)
    assert doubtful.speedup.high > usual.speedup.high * 1.1
    assert unsteady.speedup == usual.speedup
    assert unsteady.tokens_per_second.high > usual.tokens_per_second.high * 1.2


def made_step(seconds: float, requests: int = 1) -> Step:
    return Step(
        request="a",
        num_draft_tokens=0,
        num_accepted_tokens=0,
        tokens=(1,),
        timing=Timing(target=seconds),
        num_requests=requests,
        bonus=True,
    )


def test_the_slowness_of_a_run_counts_disturbed_steps_and_leaves_those_out_that_read_prompts():
    usual = [made_step(seconds) for seconds in (50.0, 1.0, 1.0, 1.0, 9.0)]
    shared = made_step(2.0, requests=2)
    outputs = [usual, [made_step(70.0), shared], [replace(shared, request="b")]]
    # The shared step is the first one of the third request, so that it may have read its prompt.
    assert slowness_of(outputs, [CHEAP], example(0.5)) == pytest.approx(12.0 / 4)


def test_recorded_texts_end_where_plain_decoding_of_the_engine_ends():
    engine, greedy = outrider.load(dtype="float32", max_slots=1), Sampling(temperature=0)
    prompts = [engine.encode("Once upon a time")]
    [whole] = engine.plain().generate(prompts, max_new_tokens=16, sampling=greedy)
    engine.stop = (whole.text.split()[3],)
    [stopped] = engine.plain().generate(prompts, max_new_tokens=16, sampling=greedy)
    made = record(engine, {"model": engine.parts.drafter}, prompts, sampling=greedy, max_new_tokens=16, depth=2)
    assert stopped.finish_reason == "stop"
    assert made.texts[0].tokens.tolist() == list(stopped.tokens)
    assert made.texts[0].ended


def test_a_recording_that_has_no_time_left_has_the_texts_of_the_first_prompts():
    engine = outrider.load(dtype="float32", max_slots=3)
    prompts = [engine.encode(text) for text in ("Once", "The sun", "A dog ran", "def add(", "My friend")]
    drafters = {"model": engine.parts.drafter, "ngram": NgramDrafter()}
    settings = {"sampling": SAMPLED, "max_new_tokens": 6, "depth": 2}
    whole = record(engine, drafters, prompts, **settings)
    hurried = record(engine, drafters, prompts, max_seconds=0.0, **settings)
    assert [len(run.texts) for run in (whole, hurried)] == [5, 2]
    for some, all_of_them in zip(hurried.texts, whole.texts, strict=False):
        assert some.tokens.tolist() == all_of_them.tokens.tolist()
        assert some.log_probs == pytest.approx(all_of_them.log_probs, abs=1e-4)
    for name, rows in hurried.drafts.items():
        assert len(rows) == 2
        for some, one in zip(rows, whole.drafts[name], strict=False):
            assert some.log_probs == pytest.approx(one.log_probs, abs=1e-4)


def test_what_is_no_record_is_refused(tmp_path):
    (tmp_path / "x.npz").write_bytes(b"nothing")
    with pytest.raises(InputError, match="is no record"):
        RecordedRun.read(tmp_path / "x.npz")


def test_a_drafter_that_looks_tokens_up_survives_where_it_proposed_the_text():
    parts = replace(tables(VOCAB, MatchVerifier(), 2), drafter=NgramDrafter(prompt_lookup_min=1))
    text = TargetText(prompt=4, tokens=np.array([1, 2, 1]), log_probs=np.zeros(3), ended=False)
    [(_, rows)] = along(parts, parts.drafter, [Continuation(prompt=(0, 1, 2, 0), text=text)], SAMPLED, 2)
    # It copies 1 2 after the prompt, then 2 0, then 0 (and what follows lies behind the text).
    assert rows.log_probs[:, 0].tolist() == [0.0, 0.0, -np.inf]
    assert rows.log_probs[:2, 1].tolist() == [0.0, -np.inf]
    assert rows.guesses[:2].tolist() == [2, 2]
    assert rows.trees == {}


def test_the_best_tree_is_wide_where_forwards_of_many_nodes_are_cheap():
    drafter = ModelDrafter(lm=TabularLM(random_rows(VOCAB, 7), VOCAB))
    ranks = np.array([0.0, 1.0, 0.0, 2.0] * 5)[:, None, None]
    rows = replace(example(0.5).drafts["model"][0], trees={"ranks": ranks})

    def tree(table: CostTable) -> DraftConfiguration | None:
        return best_tree("model", drafter, [rows], table, requests=1, sampled=False, context=64)

    flat = tree(CostTable.of_formula(lambda requests, length: 1.0))
    assert flat is not None
    assert flat.widths[0] == 3
    assert sum(flat.widths) == 16
    assert tree(CostTable.of_formula(lambda requests, length: 1.0 + 10 * length)) is None
