"""Compiled forwards say what plain ones say, for chains and trees, alone and in batches, and are kept on disk."""

import json
import sys

from tests.lm import compiled_checks
from tests.world.compiling import needs_compiled_forwards, needs_compiler, with_kernels
from tests.world.forked import printed


@needs_compiler
@needs_compiled_forwards
def test_compiled_forwards_say_what_plain_ones_say_and_their_libraries_are_kept(tmp_path):
    status, out, err = printed(compiled_checks.main, OUTRIDER_CACHE=with_kernels(tmp_path))
    assert status == 0, err[-3000:]
    found = json.loads(out.splitlines()[-1])
    for name in ("without taps", "with taps"):
        differences = found[f"differences {name}"]
        assert set(differences) == set(compiled_checks.CASES)
        assert max(differences.values()) < 1e-5, differences
        assert found[f"all forwards {name} are compiled"]
    assert all(found["unprepared"].values()), found["unprepared"]
    assert err.count("no library computes the forward of llama and outputs hidden states 0, 1") == 1
    assert found["wide"]["some"]
    assert max(found["wide"]["differences"].values()) < 1e-5
    if sys.platform == "linux":
        assert found["pages"]["wide"] > found["pages"]["later"] == 0
    assert found["others go on"]
    assert found["needs no lock"]
    missing, few = found["failures"]
    assert "none.so" in missing
    assert few.endswith("tensors, got 0")
    experts = found["experts"]
    assert max(experts["differences"].values()) < 1e-5, experts
    assert experts["some"]
    assert experts["widest"]
    assert "it calls transformers::grouped_mm_fallback, which the compiler does not know" in experts["refused"]
    assert experts["left"] == []
    assert set(found["heads"]) == {"own features", "block"}
    for head in found["heads"].values():
        assert all(head.values()), head
    assert found["greedy output is the same"]
    assert found["error of the law"] < 1e-6
    assert len(found["errors with a draft model"]) == 4
    assert max(found["errors with a draft model"].values()) < 1e-5
    kept = found["kept"]
    assert kept["there"]
    assert kept["not made again"]
    assert "compiled" in kept["at hand"]
    assert kept["for every number of threads"]
    assert kept["none made for other threads"]
    for other in ("of other weights", "of other taps", "with another key"):
        assert not kept[other], other
    assert found["prepared"].pop("measured")[:1] == ["compiled"]
    assert all(found["prepared"].values()), found["prepared"]
    # Each library is made once, and that is said: without taps, with taps, and for each kind of a head's forwards.
    assert err.count("compiling the forward of llama") == 2
    assert err.count("compiling the forward of ToyModule") == 3
