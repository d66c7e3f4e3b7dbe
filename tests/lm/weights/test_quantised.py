"""Codes of plain weights are those that gguf, and so llama.cpp, gives them."""

import gguf
import pytest
import torch

from outrider.core.types import InputError
from outrider.lm.weights.blocks import BlockWeight
from outrider.lm.weights.quantised import QUANTISERS, quantised

CASTS = True


@pytest.mark.parametrize("kind", QUANTISERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_those_of_gguf(kind: str, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    weight = (torch.randn(1100, 96, generator=random) ** 3 * 0.02).to(dtype)
    weight[3, :32], weight[4, 40] = 0, 5
    # Both ends of a group are equally far from zero, and every weight is halfway between two codes.
    weight[5, :32] = torch.arange(32) - 15.5
    blocks = gguf.quants.quantize(weight.float().numpy(), gguf.GGMLQuantizationType[kind])
    assert torch.equal(quantised(weight, kind).data, BlockWeight.of_gguf(blocks, kind).data)


def test_what_cannot_be_rounded_is_refused() -> None:
    with pytest.raises(InputError, match="unknown kind of blocks 'Q3_K'; available: Q8_0, Q4_0"):
        quantised(torch.zeros(4, 32), "Q3_K")
    with pytest.raises(InputError, match="a row of 40 is not made of them"):
        quantised(torch.zeros(4, 40), "Q8_0")
