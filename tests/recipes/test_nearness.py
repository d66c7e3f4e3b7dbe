"""The divergence of an engine from the float32 model is a lower bound, and 0 for the model itself."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider import InputError
from outrider.bench.engines.server import ServerDriver
from outrider.embedded import EMBEDDED_DRAFT, EMBEDDED_TARGET
from recipes import nearness
from recipes.nearness import divergence, likeliest


@given(seed=st.integers(0, 10_000), size=st.integers(2, 30), kept=st.integers(1, 30))
def test_what_is_told_of_the_likeliest_tokens_bounds_the_divergence_from_below(seed, size, kept):
    p, q = torch.randn(2, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).log_softmax(-1)
    top = q.topk(min(kept, size)).indices.tolist()
    whole = float((p.exp() * (p - q)).sum())
    bound = divergence(p, {token: float(q[token]) for token in top})
    assert -1e-9 <= bound <= whole + 1e-9
    if kept >= size:
        assert bound == pytest.approx(whole, abs=1e-9)


def test_a_file_in_float32_is_as_near_as_rounding_lets_it_be(tmp_path, capsys):
    files = pytest.importorskip("tests.world.gguf_files")
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_DRAFT, dtype=torch.float32)
    file = files.write_gguf(tmp_path / "target.gguf", model, AutoTokenizer.from_pretrained(EMBEDDED_TARGET))
    nearness.main(target=file, out=tmp_path / "out", **nearness.QUICK)
    [line] = [line for line in (tmp_path / "out" / "table.md").read_text().splitlines() if "Outrider" in line]
    mean, same = (line.split("|")[column].strip() for column in (2, 4))
    assert 0 <= float(mean) < (1e-9 if "float32" in line else 1e-3)
    assert float(same.rstrip("%")) >= 95
    with pytest.raises(InputError, match="unknown engine 'lama'; available: outrider, llama, ik_llama"):
        nearness.main(target=file, engines="lama")


@pytest.mark.parametrize(("words", "told"), [("invalid UTF-8 byte at index 0: 0xB7", True), ("no model", False)])
def test_a_position_that_a_server_cannot_tell_as_json_is_left_out(words, told):
    class Server(ServerDriver):
        def __init__(self) -> None:
            pass

        def likeliest(self, prompt, count):
            raise ValueError(words)

    if told:
        assert likeliest(Server(), [1, 2], 10) is None
    else:
        with pytest.raises(ValueError, match="no model"):
            likeliest(Server(), [1, 2], 10)
