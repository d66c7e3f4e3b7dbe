"""The list of what works says what the models then do."""

import numpy as np
import pytest
import torch
from transformers import MptConfig

from outrider.core.types import InputError
from outrider.lm.hf.anatomy import STEPWISE, Anatomy
from outrider.lm.hf.capabilities import Capability, capabilities
from outrider.lm.open import as_lm
from outrider.lm.protocol import Segment
from recipes.tiny import tiny_config as tiny_config_of
from recipes.tiny import tiny_model
from tests.world.recurrent_zoo import RECURRENT, recurrent_config, tiny_recurrent
from tests.world.zoo import ARCHITECTURES, tiny, tiny_config


def told(name: str) -> dict[str, Capability]:
    config = recurrent_config(name) if name in RECURRENT else tiny_config(name)
    return {line.feature: line for line in capabilities(config)}


@pytest.mark.parametrize("name", [*ARCHITECTURES, *RECURRENT])
def test_every_model_of_the_zoos_can_be_a_target_and_every_line_has_a_reason(name: str) -> None:
    lines = told(name)
    assert lines["target"].supported
    assert all(line.reason for line in lines.values())
    assert lines["branching trees"].supported == (name not in RECURRENT)
    assert ("token by token" in lines["chains"].reason) == (name in STEPWISE)


@pytest.mark.parametrize("name", ["llama", "bloom", "qwen3_next", "mamba"])
def test_trees_are_read_where_the_list_says_so(name: str) -> None:
    lm = as_lm(tiny_recurrent(name) if name in RECURRENT else tiny(name), max_slots=1)
    siblings = Segment(slot=lm.open(), tokens=torch.tensor([3, 4]), parents=np.array([-1, -1]))
    if told(name)["branching trees"].supported:
        assert len(lm.extend([siblings]).logits) == 2
    else:
        with pytest.raises(ValueError, match="cannot read a branching tree"):
            lm.extend([siblings])


def test_a_refused_model_has_one_line_with_the_reason() -> None:
    [line] = capabilities(MptConfig())
    assert (line.feature, line.supported) == ("target", False)
    assert "ALiBi" in line.reason


def test_the_context_is_the_one_that_the_model_gets() -> None:
    for name in ("llama", "llama4", "mamba2"):
        config = recurrent_config(name) if name in RECURRENT else tiny_config(name)
        assert told(name)["context"].reason.startswith(str(Anatomy.of(config).longest_context))
    config = recurrent_config("mamba2")
    config.max_position_embeddings = None
    [line] = [line for line in capabilities(config) if line.feature == "context"]
    assert line.reason.startswith("as long as memory allows")


def test_the_attention_implementation_of_a_model_is_named() -> None:
    [line] = [c for c in capabilities(tiny("llama", attention="eager")) if c.feature == "attention implementation"]
    assert line.reason.startswith("eager")
    model = tiny("llama")
    model.config._attn_implementation = "flash_attention_2"
    [line] = capabilities(model)
    assert "flash_attention_2" in line.reason
    assert not line.supported


def test_hidden_states_are_not_promised_where_layers_stand_in_no_one_list() -> None:
    model = tiny_model(tiny_config_of("longcat_flash"))
    [line] = [line for line in capabilities(model) if line.feature == "taps"]
    assert not line.supported
    lm = as_lm(model, max_slots=1)
    with pytest.raises(InputError, match=r"hidden states \[0\] cannot be read"):
        lm.extend([Segment(slot=lm.open(), tokens=torch.tensor([3, 4]))], taps=[0])
    assert [line.supported for line in capabilities(tiny("llama")) if line.feature == "taps"] == [True]
