"""What verifiers decide on a GPU, all nodes at once, is what they decide on a CPU, node by node."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from outrider.core.types import Draft
from outrider.verifiers.protocol import Deciding
from tests.verifiers.test_twins import VOCAB, drafted, pairs
from tests.world.card import DEVICE, gpu
from tests.world.verifiers import verifier

ROOMS = ([3, 0, 4], [2], [0, 0])


@pytest.fixture(scope="module", autouse=True)
def _card() -> Iterator[None]:
    with gpu():
        yield


def on_gpu(draft: Draft) -> Draft:
    return replace(draft, tokens=draft.tokens.to(DEVICE), rows=None if draft.rows is None else draft.rows.to(DEVICE))


@pytest.mark.parametrize(("tree", "name"), [pair for pair in pairs() if isinstance(verifier(pair.values[1]), Deciding)])
def test_a_decision_is_the_verdict_of_a_cpu(tree, name):
    rule, accepted = verifier(name), 0
    for seed in range(12):
        draft, dice = drafted(tree, ROOMS[seed % 3], seed)
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(len(draft.parents), VOCAB, dtype=torch.float64, generator=generator).softmax(-1)
        expected = rule.verify(draft, rows, dice)
        found = rule.decide(on_gpu(draft), rows.to(DEVICE), dice).verdict(draft)
        assert found.num_accepted.tolist() == expected.num_accepted.tolist()
        assert found.paths.tolist() == expected.paths.tolist()
        assert found.next_tokens.tolist() == expected.next_tokens.tolist()
        accepted += int(expected.num_accepted.sum())
    assert accepted > 0, "verdicts that accept nothing test little"
