"""A model's embedding, final norm and output layer, as drafters use them."""

import pytest
import torch

from outrider.core.types import InputError
from outrider.lm.open import as_lm
from outrider.lm.protocol import Segment
from tests.world.recurrent_zoo import RECURRENT, tiny_recurrent
from tests.world.zoo import ARCHITECTURES, tiny

pytestmark = pytest.mark.usefixtures("float64_stays_float64")

STREAMS = {"gemma3n"}
"""Models whose layers pass on several residual streams."""


@torch.inference_mode()
@pytest.mark.parametrize("name", [*ARCHITECTURES, *RECURRENT])
def test_the_output_layer_makes_the_models_own_logits_of_what_leaves_the_last_layer(name: str) -> None:
    lm = as_lm(tiny(name) if name in ARCHITECTURES else tiny_recurrent(name), max_slots=1)
    if name in STREAMS:
        with pytest.raises(InputError, match="several residual streams"):
            lm.embedding_and_head()
        return
    slot, last = lm.open(), lm.num_layers
    said = lm.extend([Segment(slot=slot, tokens=torch.tensor([5, 9, 4, 7]))], taps=[last])
    ends = lm.embedding_and_head()
    ours = ends.head(ends.norm(said.taps[last]))
    assert float((ours - said.logits).abs().max()) < 1e-9
    assert torch.equal(ends.embed(torch.tensor([5])), lm.model.get_input_embeddings()(torch.tensor([5])))


@torch.inference_mode()
@pytest.mark.parametrize("name", sorted({*ARCHITECTURES} - STREAMS) + sorted(RECURRENT))
def test_an_output_layer_that_is_cut_makes_the_same_logits_of_fewer_tokens(name: str) -> None:
    lm = as_lm(tiny(name) if name in ARCHITECTURES else tiny_recurrent(name), max_slots=1)
    ids, whole = [3, 9, 10, 40], lm.embedding_and_head()
    hidden = torch.randn(2, 3, lm.hidden_size, dtype=lm.dtype)
    rows, owned = whole.head(hidden), lm.model.get_output_embeddings()
    cut = whole.cut(ids)
    assert float((cut.head(hidden) - rows[..., ids]).abs().max()) < 1e-9
    assert float((cut.logits(hidden) - rows[..., ids]).abs().max()) < 1e-9
    # The target's own layer stays whole, and a library of the head does not hold it.
    assert torch.equal(whole.head(hidden), rows)
    assert owned not in cut.modules.children()


def test_an_output_layer_that_is_no_linear_layer_cannot_be_cut() -> None:
    model = tiny("llama")
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(InputError, match=r"output layer is a Sequential, .* leave token_map out"):
        as_lm(model, max_slots=1).embedding_and_head().cut([3])


def test_a_copy_of_what_holds_them_does_not_copy_the_model() -> None:
    import copy

    ends = as_lm(tiny("llama"), max_slots=1).embedding_and_head()
    assert copy.deepcopy({"ends": ends})["ends"] is ends


def test_finding_them_leaves_no_hooks_and_changes_nothing() -> None:
    lm = as_lm(tiny("llama").requires_grad_(False), max_slots=1)
    before = lm.model(torch.tensor([[3, 4]])).logits
    lm.embedding_and_head()
    assert torch.equal(lm.model(torch.tensor([[3, 4]])).logits, before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in lm.model.modules())
