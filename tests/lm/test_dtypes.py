"""Models in the dtypes that people use, with the casts that transformers makes."""

import numpy as np
import pytest
import torch

from outrider.lm.model import LanguageModel
from outrider.lm.protocol import Segment
from tests.world.zoo import tiny

CASTS = True


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.15)])
@pytest.mark.parametrize(("name", "attention"), [("qwen3", "sdpa"), ("gemma3", "eager"), ("gpt2", "sdpa")])
def test_lower_precision_is_right_up_to_rounding(
    name: str, attention: str, dtype: torch.dtype, tolerance: float
) -> None:
    model = tiny(name, attention=attention).to(dtype)
    lm = LanguageModel(model, max_slots=2, pad_to=2)
    slot, other = lm.open(), lm.open()
    tokens = torch.arange(3, 33)
    lm.extend([Segment(slot=slot, tokens=tokens, logits="none"), Segment(slot=other, tokens=tokens[:4])])
    lm.commit({slot: range(30)})
    parents = np.array([-1, -1, 1, 0])
    extension = lm.extend([Segment(slot=slot, tokens=torch.tensor([5, 7, 5, 9]), parents=parents)], taps=(1,))
    assert extension.logits.dtype == extension.taps[1].dtype == lm.dtype == dtype
    for node, path in ((2, [7, 5]), (3, [5, 9])):
        with torch.no_grad():
            plain = model(torch.cat([tokens, torch.tensor(path)])[None], use_cache=False).logits[0, -1].float()
        spread = float(plain.max() - plain.min())
        assert float((extension.logits[node].float() - plain).abs().max()) <= tolerance * spread
