"""Compiled forwards compute for the nodes of ragged rows alone, and say what padded ones say. Here nothing is compiled:
the function that a library is made from runs as it is.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor

from outrider.lm.forwards.package import Package
from outrider.lm.hf import alibi
from outrider.lm.model import LanguageModel
from outrider.lm.protocol import Segment
from outrider.lm.slots.layout import Layout, NodeOrder
from recipes.tiny import Float64, tiny_config, tiny_model
from tests.world.zoo import ARCHITECTURES, VOCAB, attention_of, tiny

PROMPTS = ([3, 1, 4, 1, 5, 9, 2], [6, 5], [(7 * k + 3) % VOCAB for k in range(20)])
PIECES = (([5, 3, 5, 8, 9], [-1, -1, 0, 0, 2]), ([7], None), ([9, 3, 2], None))
"""Tokens behind each prompt, and their parents."""


class Uncompiled:
    """Runs the function of a package as it is.

    Attributes:
        sizes: The number of tokens of each forward.
    """

    sizes: list[int]

    def __init__(self, package: Package) -> None:
        self._function, self._inputs, _ = package.traced()
        self.sizes = []

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        left = iter(inputs)
        given: list[Any] = [
            [next(left) for _ in each] if isinstance(each, list) else None if each is None else next(left)
            for each in self._inputs
        ]
        self.sizes.append(given[0].numel())
        return list(self._function(*given))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Uncompiled]:
    """The packages that were opened."""
    found: list[Uncompiled] = []

    def open_(package: Package) -> Uncompiled:
        found.append(Uncompiled(package))
        return found[-1]

    monkeypatch.setattr(Package, "open", open_)
    # Any torch can run them so.
    monkeypatch.setattr("outrider.lm.model.COMPILES", Version("0"))
    return found


def said(lm: LanguageModel, taps: Sequence[int]) -> list[Tensor]:
    """What a model says of `PIECES`, in two orders of rows."""
    slots = [lm.open() for _ in PROMPTS]
    for slot, prompt in zip(slots, PROMPTS, strict=True):
        lm.extend([Segment(slot=slot, tokens=torch.tensor(prompt), logits="none")])
        lm.commit({slot: range(len(prompt))})
    found = []
    for order, logits in (((0, 1, 2), "all"), ((2, 0, 1), "last"), ((1, 0), "all"), ((1, 2, 0), "none")):
        pieces = [
            Segment(
                slot=slots[i],
                tokens=torch.tensor(PIECES[i][0]),
                parents=None if PIECES[i][1] is None else np.array(PIECES[i][1]),
                logits=logits,
            )
            for i in order
        ]
        extension = lm.extend(pieces, taps=taps)
        found += [extension.logits, *extension.taps.values()]
        lm.commit({slots[i]: [] for i in order})
    return found


OWN_ATTENTION = ("falcon",)
"""Models that call torch's attention themselves."""
COMPILED = [name for name in ARCHITECTURES if tiny(name).config.model_type not in alibi.MODELS]


@pytest.mark.parametrize("name", COMPILED)
def test_nodes_alone_say_what_padded_rows_say(name: str, opened: list[Uncompiled]) -> None:
    model = tiny(name)
    plain, compiled = LanguageModel(model, max_slots=4), LanguageModel(model, max_slots=4, forward="compiled")
    # Its layers have several residual streams.
    taps = () if name == "gemma3n" else (0, plain.num_layers)
    compiled.prepare(taps)
    compiled.narrow = None
    for one, other in zip(said(plain, taps), said(compiled, taps), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    looked_up = name not in OWN_ATTENTION and attention_of(name) == "sdpa"
    assert opened[-1].sizes[-4:] == ([9, 9, 6, 9] if looked_up else [15, 15, 10, 15])


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.18"), reason="the doge of transformers 5.17 reads no trees"
)
def test_a_model_that_changes_its_masks_keeps_padded_rows(opened: list[Uncompiled]) -> None:
    with Float64():
        model = tiny_model(tiny_config("doge"))
        plain, compiled = LanguageModel(model, max_slots=4), LanguageModel(model, max_slots=4, forward="compiled")
        for one, other in zip(said(plain, ()), said(compiled, ()), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    assert opened[-1].sizes[-4:] == [15, 15, 10, 15]


def test_padding_makes_few_sizes_and_its_results_are_left_out(opened: list[Uncompiled]) -> None:
    model = tiny("llama")
    plain, compiled = LanguageModel(model, max_slots=2), LanguageModel(model, max_slots=2, forward="compiled")
    opened[-1].sizes.clear()
    for lm in (plain, compiled):
        lm.pad_to = 2
    long, short = [(11 * k + 2) % VOCAB for k in range(36)], [4]
    found = []
    for lm in (plain, compiled):
        slots = [lm.open(), lm.open()]
        pieces = [Segment(slot=slot, tokens=torch.tensor(t)) for slot, t in zip(slots, (short, long), strict=True)]
        found.append(lm.extend(pieces).logits)
        lm.commit({slots[0]: [0], slots[1]: range(36)})
        found.append(lm.extend([Segment(slot=slot, tokens=torch.tensor([5])) for slot in slots]).logits)
    assert opened[-1].sizes == [40, 2]
    assert found[0].shape == (37, VOCAB)
    torch.testing.assert_close(found[0], found[2])
    torch.testing.assert_close(found[1], found[3])


def test_rows_without_padding_go_as_they_are(opened: list[Uncompiled]) -> None:
    lm = LanguageModel(tiny("llama"), max_slots=2, forward="compiled")
    opened[-1].sizes.clear()
    slots = [lm.open(), lm.open()]
    lm.extend([Segment(slot=slot, tokens=torch.tensor([5, 6, 7])) for slot in slots])
    lm.extend([Segment(slot=slots[1], tokens=torch.tensor([5, 6]))])
    assert opened[-1].sizes == [6, 2]


def test_the_layout_of_an_order_leads_there_and_back() -> None:
    counts, order = np.array([3, 1, 4]), (2, 0, 1)
    made = NodeOrder.of(counts, order, width=5)
    assert made.first.tolist() == [0, 4, 7]
    assert made.nodes.tolist() == [[4, 5, 6, 6, 6], [7, 7, 7, 7, 7], [0, 1, 2, 3, 3]]
    layout = Layout(nodes=torch.from_numpy(made.nodes), places=torch.from_numpy(made.places))
    states = torch.arange(8 * 6.0).view(1, 8, 2, 3)
    torch.testing.assert_close(layout.back(layout.rows(states.transpose(1, 2)).transpose(1, 2)), states)
