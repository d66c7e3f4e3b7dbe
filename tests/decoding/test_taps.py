"""A drafter that asks for hidden states is told every position but the anchor, once, in order."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.core.types import Running, Sampling
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.protocol import Observed
from outrider.engine.engine import Engine
from outrider.lm.model import LanguageModel
from outrider.lm.slots import budget
from outrider.verifiers.block import BlockVerifier
from tests.world.parts import parts_of
from tests.world.zoo import VOCAB, tiny

pytestmark = pytest.mark.usefixtures("float64_stays_float64")


@dataclass(frozen=True, kw_only=True)
class Listener(NgramDrafter):
    """Prompt lookup that keeps what it observes, per request."""

    heard: dict[str, list[tuple[int, dict[int, Tensor]]]] = field(default_factory=dict)
    wanted: tuple[int, ...] = (0, 2, 3)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.wanted

    def observe(self, states: Sequence[Running], observed: Observed) -> None:
        for r, state in enumerate(states):
            heard = self.heard.setdefault(state.request.id, [])
            for i in range(observed.offsets[r], observed.offsets[r + 1]):
                heard.append((int(observed.tokens[i]), {k: seen[i].clone() for k, seen in observed.taps.items()}))


def plain_states(tokens: list[int]) -> dict[int, Tensor]:
    """What enters layers 0 and 2, and what leaves the last, in one uncached forward."""
    model = tiny("llama")
    left: list[Tensor] = []
    handle = model.model.layers[-1].register_forward_hook(
        lambda module, args, out: left.append(out[0] if isinstance(out, tuple) else out)
    )
    with torch.no_grad():
        hidden = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    handle.remove()
    return {0: hidden[0][0], 2: hidden[2][0], 3: left[0].reshape(len(tokens), -1)}


def test_observe_hears_every_position_but_the_anchor_once_and_in_order(monkeypatch):
    monkeypatch.setattr(budget, "WIDE_CHUNK", 7)
    listener = Listener(prompt_lookup_min=1)
    target = LanguageModel(tiny("llama"), max_slots=3)
    parts = parts_of(target, listener, verifier=BlockVerifier())
    engine = Engine(parts, max_slots=3)
    random = np.random.default_rng(0)
    prompts = {str(n): random.integers(3, VOCAB, size=n).tolist() for n in (1, 9, 23)}
    for name, prompt in prompts.items():
        engine.add(prompt, max_new_tokens=60, sampling=Sampling(temperature=0.2, seed=1), id=name)
    outputs = {}
    while engine.busy:
        for update in engine.step():
            if update.output is not None:
                outputs[update.id] = update.output
    assert sum(output.num_accepted_tokens for output in outputs.values()) > 0
    for name, prompt in prompts.items():
        everything = [*prompt, *outputs[name].tokens]
        assert [token for token, _ in listener.heard[name]] == everything[:-1]
        expected = plain_states(everything[:-1])
        for i, (_, seen) in enumerate(listener.heard[name]):
            for tap, value in seen.items():
                assert float((value - expected[tap][i]).abs().max()) < 1e-9, (name, i, tap)
