"""Compiled forwards of models with packed weights: what they say, whose memory they read, and where they cannot run."""

import json

from tests.lm import compiled_block_checks
from tests.world.compiling import needs_compiled_forwards, needs_compiler, with_kernels
from tests.world.forked import printed


@needs_compiler
@needs_compiled_forwards
def test_compiled_forwards_compute_from_packed_weights_in_their_places(tmp_path) -> None:
    status, out, err = printed(compiled_block_checks.main, OUTRIDER_CACHE=with_kernels(tmp_path))
    assert status == 0, err[-3000:]
    found = json.loads(out.splitlines()[-1])
    for dtype, tolerance in (("torch.float32", 1e-5), ("torch.bfloat16", 0.03)):
        results = found[dtype]
        assert max(results["differences"].values()) < tolerance, results["differences"]
        assert results["compiled"]
        assert results["gated"]
        assert set(results["differing"].values()) == {0}, results["differing"]
        assert "0.model.embed_tokens.data" in results["own"]
        # Layers that stayed plain may be packed in bfloat16.
        assert [kind for kind in results["at hand"] if kind != "packed"] == ["eager", "compiled"]
    without = found["torch.float32"]["without a compiler"]
    assert not without["there"]
    assert without["at hand"] == ["eager"]
    reason = "it calls functions in C++, which need a compiler to be built here"
    assert without["said"][0] == f"the compiled forward of llama is not used: {reason}"
    assert without["refused"] == (
        f"the forward of llama cannot be compiled ahead of time: {reason}; choose another forward"
    )
    assert found["torch.float32"]["other kernels"]
