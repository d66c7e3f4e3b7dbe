"""Whose matrix products a compiled forward uses, by what the processor has."""

import pytest
import torch

from outrider.lm.forwards.libraries import _options

HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("dtype", "instructions", "units", "own"),
    [
        (HALF, False, False, True),
        (HALF, True, False, False),
        (HALF, True, True, True),
        (SINGLE, True, False, True),
        (DOUBLE, False, False, False),
    ],
)
def test_the_compilers_products_are_not_used_where_onednn_knows_more(monkeypatch, dtype, instructions, units, own):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instructions)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: units)
    options = _options(dtype)
    assert options["freezing"]
    assert (options.get("max_autotune_gemm_backends") == "CPP") is own
