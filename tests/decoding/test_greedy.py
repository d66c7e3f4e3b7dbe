"""At temperature 0 the likeliest tokens alone decide what is accepted: the same as most verifiers say."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.core.dice import PhiloxDice
from outrider.core.sampling import pack
from outrider.core.types import Draft, Request, Running, Sampling
from outrider.decoding.protocol import NoDistribution
from outrider.decoding.reading import TargetReading
from outrider.decoding.step import needs_no_rows, verify
from outrider.lm.protocol import Extension
from tests.world.drafts import chains
from tests.world.models import engine
from tests.world.verifiers import CARRYING, LOSSLESS, LOSSY, judges_of, verifier

VOCAB = 5
GREEDY = Sampling(temperature=0.0)


def running(count: int, sampling: Sampling = GREEDY) -> list[Running]:
    """Requests with one token each."""
    return [
        Running(
            request=Request(id=str(i), prompt=(0,), max_new_tokens=9, sampling=sampling),
            tokens=[0],
            slot=i,
            drafter=None,
        )
        for i in range(count)
    ]


def reading(draft: Draft, seed: int) -> TargetReading:
    """A draft with random logits, some of which tie."""
    logits = torch.randint(0, 4, (len(draft.tokens), VOCAB), generator=torch.Generator().manual_seed(seed)).float()
    extension = Extension(logits=logits, taps={}, features=None)
    return TargetReading(draft=draft, behind=[[] for _ in range(draft.num_requests)], extension=extension)


def random_chains(seed: int) -> Draft:
    """Chosen chains of three requests."""
    random = np.random.default_rng(seed)
    return chains([random.integers(0, VOCAB, size=random.integers(0, 5)).tolist() for _ in range(3)], None)


def random_trees(seed: int) -> Draft:
    """Chosen trees of two requests, in which the children of a node differ."""
    random, parents, tokens, offsets = np.random.default_rng(seed), [], [], [0]
    for _ in range(2):
        root, taken = len(parents), set[tuple[int, int]]()
        parents.append(-1)
        tokens.append(0)
        for _ in range(9):
            above, token = int(random.integers(root, len(parents))), int(random.integers(VOCAB))
            if (above, token) not in taken:
                taken.add((above, token))
                parents.append(above)
                tokens.append(token)
        offsets.append(len(parents))
    above = np.array(parents)
    links = np.flatnonzero(above >= 0)
    links = links[np.argsort(above[links], kind="stable")]
    depths = np.zeros(len(above), dtype=np.int64)
    for node in np.flatnonzero(above >= 0):
        depths[node] = depths[above[node]] + 1
    return Draft(
        tokens=torch.tensor(tokens),
        parents=above,
        depths=depths,
        numbers=np.arange(len(above)) - np.repeat(offsets[:-1], np.diff(offsets)),
        offsets=np.array(offsets),
        first_child=np.concatenate([[0], np.cumsum(np.bincount(above[links], minlength=len(above)))]),
        links=links,
        rows=None,
        row_of=np.full(len(above), -1),
        structure="deterministic",
    )


def assert_agrees(name: str, draft: Draft, seed: int) -> int:
    """Compare with a verifier's own verdict. Returns how many tokens were accepted."""
    read, states = reading(draft, seed), running(draft.num_requests)
    assert needs_no_rows(verifier(name), draft, states)
    rows = read.rows(states, None)
    dice = PhiloxDice(seeds=list(range(len(states))), steps=[seed] * len(states))
    wanted = read.survivors(verify(verifier(name), draft, rows, dice, states), rows, states)
    assert read.agreeing(read.likeliest(states, None), states) == wanted
    return sum(len(survivor.path) for survivor in wanted)


@pytest.mark.parametrize("name", [name for name in LOSSLESS if name not in CARRYING])
def test_chains(name: str) -> None:
    assert sum(assert_agrees(name, random_chains(seed), seed) for seed in range(60)) > 20


@pytest.mark.parametrize("name", judges_of("chosen tree"))
def test_trees(name: str) -> None:
    assert sum(assert_agrees(name, random_trees(seed), seed) for seed in range(60)) > 20


def test_rows_are_needed_where_more_than_the_likeliest_token_decides() -> None:
    draft, states = random_chains(3), running(3)
    assert needs_no_rows(verifier("block"), draft, states)
    assert not needs_no_rows(verifier("block"), draft, [*states[:2], *running(1, Sampling())])
    assert not needs_no_rows(verifier("block"), replace(draft, rows=torch.ones(1, VOCAB)), states)
    for name in [*LOSSY, *CARRYING]:
        assert not needs_no_rows(verifier(name), draft, states)


def test_masks_and_biases_count() -> None:
    draft = chains([[1, 2], [3]], None)
    states = running(2, replace(GREEDY, logit_bias={4: 9.0}))
    read = reading(draft, 0)
    free = read.likeliest(states, None)
    allowed = torch.ones(len(draft.tokens), VOCAB, dtype=torch.bool)
    allowed[0, 4] = allowed[3] = False
    kept = read.likeliest(states, pack(allowed))
    assert free.tolist() == [4] * 5
    assert kept[0] == read.extension.logits[0, :4].argmax()
    assert kept[1:].tolist() == [4, 4, -1, 4]
    assert torch.equal(read.rows(states, pack(allowed)).argmax(-1)[[0, 1, 2, 4]], kept[[0, 1, 2, 4]])


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_place_without_a_distribution_ends_a_request_only_on_its_path(value: float) -> None:
    draft, states = chains([[1, 2], [3]], None), running(2)
    read = reading(draft, 0)
    read.extension.logits[:] = torch.eye(VOCAB)[[1, 4, 0, 2, 0]]
    read.extension.logits[2] = value
    assert [found.tokens for found in read.agreeing(read.likeliest(states, None), states)] == [[1, 4], [2]]
    read.extension.logits[3] = value
    with pytest.raises(NoDistribution, match="request '1'"):
        read.agreeing(read.likeliest(states, None), states)


def test_an_engine_makes_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"max_new_tokens": 20, "sampling": GREEDY, "ignore_eos": True}
    wanted = engine().generate([[5, 9, 4], [7] * 6], **asked)
    seen, cycles = engine(), []
    seen.watch = cycles.append
    watched = seen.generate([[5, 9, 4], [7] * 6], **asked)
    assert all(cycle.rows.sum() == len(cycle.draft.tokens) for cycle in cycles)
    monkeypatch.setattr("outrider.core.sampling._one_hot", lambda scores: pytest.fail("a row was made"))
    found = engine().generate([[5, 9, 4], [7] * 6], **asked)
    assert [output.tokens for output in found] == [output.tokens for output in wanted]
    assert [output.tokens for output in found] == [output.tokens for output in watched]
    assert [output.num_steps for output in found] == [output.num_steps for output in watched]
