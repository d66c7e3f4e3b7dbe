"""Points of a sweep are merged by their configuration, whoever measured them."""

import json
from dataclasses import replace

import pytest

from outrider import InputError, Sampling, Setup
from outrider.bench.side_by_side import sweep
from outrider.bench.side_by_side.configuration import Axis
from outrider.bench.side_by_side.peers import PeerOptions
from outrider.bench.side_by_side.session import BenchPlan
from outrider.bench.side_by_side.sweep import Point, Points, best_first, by_optuna, on_ray, run_sweep
from outrider.engine.generation import Generation
from tests.world.models import llama

AXES = [Axis.parse("length=fixed:1..4"), Axis.parse("verifier=token|block")]


@pytest.fixture
def plan(tmp_path):
    """A tiny target without a draft model, on two requests."""
    place = tmp_path / "trace.jsonl"
    place.write_text('{"timestamp": 0, "input_length": 9, "output_length": 6}\n' * 2)
    return BenchPlan(
        setup=Setup(llama(), drafter="ngram", ignore_generation_config=True),
        generation=Generation(max_new_tokens=6, sampling=Sampling(temperature=0), ignore_eos=True),
        workload=str(place),
        num_prompts=None,
        rounds=1,
        peers=PeerOptions(names=()),
    )


def made(key: str, speedup: float | None = 1.0, version: str = "1", cpu: str = "x") -> Point:
    told = json.dumps({"versions": {"outrider": version}, "cpu": cpu})
    whole = None if speedup is None else (speedup, speedup - 0.1, speedup + 0.1)
    return Point(key=key, made=told, load="concurrency 1", speedup=whole, output_throughput=9.0)


def test_points_are_kept_by_their_key_and_read_again(tmp_path):
    file = tmp_path / "sweep.jsonl"
    kept = Points(file)
    for point in (made("a"), made("b", None), made("a", 1.4, cpu="another machine")):
        kept.add(point)
    assert Points(file).points == kept.points
    assert [each.key for each in best_first(list(kept.points.values()))] == ["a", "b"]
    assert kept.points["a"].speedup[0] == 1.4


def test_points_of_another_version_are_not_merged(tmp_path):
    kept = Points(tmp_path / "sweep.jsonl")
    kept.add(made("a"))
    with pytest.raises(InputError, match=r"has points of a run with another versions; give another folder"):
        kept.add(made("b", version="2"))
    (tmp_path / "other.jsonl").write_text('{"key": "a"}\n')
    with pytest.raises(InputError, match="holds a line that is no point of a sweep"):
        Points(tmp_path / "other.jsonl")


def test_optuna_measures_a_point_once_and_finds_the_best(plan):
    pytest.importorskip("optuna", reason="optuna is not installed; the extra `sweep` has it")
    asked = []

    def measured(plan, configuration):
        asked.append(configuration.name)
        return made(configuration.name, 1.0 + 0.1 * int(configuration.options["length"][-1]))

    kept = Points(None)
    by_optuna(plan, AXES, 30, kept, measured)
    assert len(set(asked)) == len(asked) == len(kept.points) <= 8
    assert best_first(list(kept.points.values()))[0].key.startswith("length=fixed:4")


def test_a_library_that_is_missing_is_named(plan, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(InputError, match=r'--optuna needs optuna; `pip install "outrider\[sweep\]'):
        run_sweep(plan, AXES, trials=1)
    with pytest.raises(InputError, match=r"--ray needs ray"):
        run_sweep(plan, AXES, ray="local")


def test_a_point_is_measured_beside_plain_decoding(plan):
    [configuration] = sweep.grid([Axis.parse("length=fixed:2")])
    found = sweep.measure_point(plan, configuration)
    assert (found.key, found.load, found.reason) == ("length=fixed:2", "concurrency 1", None)
    low, high = found.speedup[1:]
    assert 0 < low <= found.speedup[0] <= high
    [unfit] = sweep.grid([Axis.parse("tree=iid:2")])
    left_out = sweep.measure_point(plan, unfit)
    assert left_out.speedup is None
    assert left_out.reason.startswith("this drafter has no distributions to draw from")


@pytest.mark.slow
def test_a_ray_cluster_measures_every_point(plan, tmp_path, monkeypatch):
    pytest.importorskip("ray", reason="ray is not installed; the extra `sweep` has it")
    axes = [Axis.parse("length=fixed:1..2")]
    found = run_sweep(replace(plan, out=tmp_path / "out"), axes, ray="local")
    assert sorted(each.key for each in found) == ["length=fixed:1", "length=fixed:2"]
    assert all(each.speedup is not None for each in found)
    # What the file holds is not measured again.
    monkeypatch.setattr(sweep, "on_ray", lambda plan, wanted, address: iter(wanted))
    assert run_sweep(replace(plan, out=tmp_path / "out"), axes, ray="local") == found
    assert on_ray is not sweep.on_ray
