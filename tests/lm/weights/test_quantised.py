"""Codes of plain weights are those that llama.cpp gives them: by gguf, or by its algorithm, number by number."""

import gguf
import numpy as np
import pytest
import torch

from outrider.core.types import InputError
from outrider.lm.weights import fits
from outrider.lm.weights.blocks import BlockWeight
from outrider.lm.weights.fits import Fits
from outrider.lm.weights.quantised import FALLBACK, QUANTISERS, fitting, quantised

CASTS = True
FLOAT = np.float32


@pytest.mark.parametrize("kind", [kind for kind in QUANTISERS if kind != "Q4_K"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_those_of_gguf(kind: str, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    weight = (torch.randn(1100, 96, generator=random) ** 3 * 0.02).to(dtype)
    weight[3, :32], weight[4, 40] = 0, 5
    # Both ends of a group are equally far from zero, and every weight is halfway between two codes.
    weight[5, :32] = torch.arange(32) - 15.5
    blocks = gguf.quants.quantize(weight.float().numpy(), gguf.GGMLQuantizationType[kind])
    assert torch.equal(quantised(weight, kind).data, BlockWeight.of_gguf(blocks, kind).data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True])
def test_codes_of_q4_k_are_those_of_its_algorithm(
    dtype: torch.dtype, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(fits, "_library", lambda: None)
    elif fits._library() is None:
        pytest.skip("no C++ compiler is here")
    random = torch.Generator().manual_seed(0)
    weight = (torch.randn(8, 512, generator=random) ** 3 * 0.02).to(dtype)
    # Groups of zeros, of one number, of one sign, with one large weight; a block of zeros and a block of tiny numbers.
    weight[0, :32], weight[0, 32:64], weight[0, 64:96] = 0, 0.3, -0.2
    weight[1, :64] = weight[1, :64].abs()
    weight[1, 64:128] = -weight[1, 64:128].abs()
    weight[2, 100], weight[2, 256:] = 4, 0
    weight[3] *= 1e-7
    weight[4, :32] = torch.arange(32) - 15.5
    blocks = np.stack(
        [np.concatenate([naive_q4_k(row[:256]), naive_q4_k(row[256:])]) for row in weight.float().numpy()]
    )
    assert torch.equal(quantised(weight, "Q4_K").data, BlockWeight.of_gguf(blocks, "Q4_K").data)


def test_fits_in_c_are_those_of_torch() -> None:
    random = torch.Generator().manual_seed(0)
    groups = torch.randn(20003, 32, generator=random) ** 3 * torch.logspace(-12, 3, 20003)[:, None]
    groups[::7], groups[1::7] = groups[::7].abs(), -groups[1::7].abs()
    groups[::11], groups[1::11] = 0, -2.5
    if fits._library() is None:
        pytest.skip("no C++ compiler is here")
    one, other = Fits.of(groups), Fits.by_torch(groups)
    assert torch.equal(one.codes, other.codes)
    assert torch.equal(one.scales, other.scales)
    assert torch.equal(one.offsets, other.offsets)


def naive_q4_k(x: np.ndarray) -> np.ndarray:
    """`quantize_row_q4_K_ref` of one block, statement by statement in float32."""
    scales, mins, codes = [], [], []
    for group in x.reshape(8, 32):
        total = FLOAT(0)
        for value in group:
            total += value * value
        mean = np.sqrt(total / FLOAT(32))
        scale, least, best = naive_fit(group, [mean + abs(value) for value in group])
        scales.append(scale)
        mins.append(-least)
        codes.append(best)
    largest, deepest = max(FLOAT(0), *scales), max(FLOAT(0), *mins)
    inverse = FLOAT(63) / largest if largest > 0 else FLOAT(0)
    inverse_min = FLOAT(63) / deepest if deepest > 0 else FLOAT(0)
    small = [min(63, round(float(inverse * scale))) for scale in scales]
    small_min = [min(63, round(float(inverse_min * least))) for least in mins]
    unit, unit_min = np.float16(largest / FLOAT(63)), np.float16(deepest / FLOAT(63))
    for j, group in enumerate(x.reshape(8, 32)):
        step, offset = FLOAT(unit) * FLOAT(small[j]), FLOAT(unit_min) * FLOAT(small_min[j])
        if step:
            codes[j] = [max(0, min(15, round(float((value + offset) / step)))) for value in group]
    packed = [0] * 12
    for j in range(8):
        if j < 4:
            packed[j], packed[j + 4] = small[j], small_min[j]
        else:
            packed[j + 4] = (small[j] & 15) | (small_min[j] & 15) << 4
            packed[j - 4] |= small[j] >> 4 << 6
            packed[j] |= small_min[j] >> 4 << 6
    nibbles = [codes[j][i] | codes[j + 1][i] << 4 for j in range(0, 8, 2) for i in range(32)]
    halves = np.array([unit, unit_min]).view(np.uint8)
    return np.concatenate([halves, np.array(packed + nibbles, np.uint8)])


def naive_fit(x: np.ndarray, weights: list[np.float32]) -> tuple[np.float32, np.float32, list[int]]:
    """`make_qkx2_quants` with squared errors: scale, the smallest weight and the codes."""
    least, most = min(x), max(x)
    sum_w, sum_x = weights[0], weights[0] * x[0]
    for w, value in zip(weights[1:], x[1:], strict=True):
        sum_w, sum_x = sum_w + w, sum_x + w * value
    least = min(least, FLOAT(0))
    if most == least:
        return FLOAT(0), least, [0] * 32
    inverse = FLOAT(15) / (most - least)
    scale = FLOAT(1) / inverse

    def coded(inverse: np.float32) -> list[int]:
        return [max(0, min(15, round(float(inverse * (value - least))))) for value in x]

    def error(codes: list[int], scale: np.float32, least: np.float32) -> np.float32:
        total = FLOAT(0)
        for w, code, value in zip(weights, codes, x, strict=True):
            off = scale * FLOAT(code) + least - value
            total += w * (off * off)
        return total

    best = coded(inverse)
    best_error = error(best, scale, least)
    for number in range(21):
        codes = coded((FLOAT(-1) + FLOAT(0.1) * FLOAT(number) + FLOAT(15)) / (most - least))
        sum_l = sum_l2 = sum_xl = FLOAT(0)
        for w, code, value in zip(weights, codes, x, strict=True):
            sum_l += w * FLOAT(code)
            sum_l2 += w * FLOAT(code) * FLOAT(code)
            sum_xl += w * FLOAT(code) * value
        determinant = sum_w * sum_l2 - sum_l * sum_l
        if determinant > 0:
            new_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant
            new_least = (sum_l2 * sum_x - sum_l * sum_xl) / determinant
            if new_least > 0:
                new_scale, new_least = sum_xl / sum_l2, FLOAT(0)
            if (new_error := error(codes, new_scale, new_least)) < best_error:
                best, best_error, scale, least = codes, new_error, new_scale, new_least
    return scale, least, best


def test_every_kind_has_a_kind_for_rows_that_are_no_whole_blocks() -> None:
    assert FALLBACK.keys() | FALLBACK.values() <= QUANTISERS.keys()
    assert [fitting(kind, 96) for kind in QUANTISERS] == ["Q8_0", "Q4_0", "Q5_0", "Q5_0"]
    assert {fitting(kind, 40) for kind in QUANTISERS} == {None}


def test_what_cannot_be_rounded_is_refused() -> None:
    with pytest.raises(InputError, match="unknown kind of blocks 'Q3_K'; available: Q8_0, Q4_0"):
        quantised(torch.zeros(4, 32), "Q3_K")
    with pytest.raises(InputError, match="a row of 40 is not made of them"):
        quantised(torch.zeros(4, 40), "Q8_0")
