"""A draft model with another vocabulary: the law, its rows and its bookkeeping, on tables."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import Sampling
from outrider.decoding.protocol import Parts
from outrider.drafters.model import ModelDrafter
from outrider.lm.protocol import LM, Segment
from outrider.lm.tabular import TabularLM, random_rows
from outrider.lm.translated import Translated
from outrider.lm.vocabulary import Translation
from outrider.proof.enumerate import law
from tests.world.automaton import After
from tests.world.parts import parts_of

# A target of four tokens over a draft model of five: 0 and 3 are shared, 1 has two pieces, 2 three.
WORDS = Translation(
    vocab_size=4,
    ours=np.array([0, 3]),
    theirs=np.array([4, 1]),
    pieces=lambda token: {0: (4,), 1: (0, 2), 2: (2, 4, 0), 3: (1,)}[token],
)
OPENED = Translation(vocab_size=4, ours=WORDS.ours, theirs=WORDS.theirs, pieces=WORDS.pieces, opening=(3,))


def inner(max_context: int = 1 << 20) -> TabularLM:
    return TabularLM(random_rows(5, seed=4), 5, max_context=max_context)


def assemble(verifier: str, tree: str = "chain", gamma: int = 2, words: Translation = WORDS) -> Parts:
    return parts_of(
        TabularLM(random_rows(4, seed=3), 4),
        ModelDrafter(lm=Translated(inner(), words)),
        tree=tree,
        verifier=verifier,
        length=gamma,
    )


@pytest.mark.parametrize(
    ("verifier", "tree"),
    [
        ("token", "chain"),
        ("block", "chain"),
        ("match", "chain"),
        ("recursive", "iid:num_paths=2"),
        ("traversal", "gumbel:branching=2x1"),
        ("match", "dynamic:width=3,num_nodes=5"),
    ],
)
def test_a_draft_model_with_another_vocabulary_keeps_the_law(verifier, tree):
    found = law(assemble(verifier, tree), [1, 0], 2, horizon=3)
    assert found.error < 1e-12
    assert found.accepted > 0


@pytest.mark.parametrize("words", [WORDS, OPENED], ids=["closed", "opened"])
def test_three_steps_of_a_chain_keep_the_law(words):
    assert law(assemble("block", words=words), [2], 3, horizon=3).error < 1e-12


def test_temperature_and_constraints_keep_the_law_over_another_vocabulary():
    parts = assemble("token")
    assert law(parts, [0], 2, Sampling(temperature=0.6), horizon=3).error < 1e-12
    only = After(vocab=4, followers={0: frozenset({1, 3}), 3: frozenset({1, 2})})
    # After 3 nothing that both have is allowed: what is drafted there is rejected.
    found = law(parts, [0], 2, horizon=3, constraint=only)
    assert found.error < 1e-12
    assert all(only.fits(output) for output in found.emitted)


def rows_of(prefix: list[int], words: Translation = WORDS) -> np.ndarray:
    """The draft model's own row after the pieces of a text, on the target's tokens."""
    pieces = [piece for token in prefix for piece in words.pieces(token)]
    found = np.zeros(4)
    found[words.ours] = random_rows(5, seed=4)((*words.opening, *pieces))[words.theirs]
    return found


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_node_of_a_growing_tree_gets_the_row_of_its_pieces(data):
    words = data.draw(st.sampled_from([WORDS, OPENED]))
    lm = Translated(inner(), words)
    assert isinstance(lm, LM)
    slot = lm.open()
    text: list[int] = []
    for _ in range(data.draw(st.integers(1, 3))):
        paths: list[list[int]] = []
        for _ in range(data.draw(st.integers(1, 2))):
            tokens = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
            count = len(paths)
            parents = [data.draw(st.integers(-1, count + i - 1)) for i in range(len(tokens))]
            for token, parent in zip(tokens, parents, strict=True):
                paths.append([*(paths[parent] if parent >= 0 else []), token])
            which = data.draw(st.sampled_from(["all", "last", "none"]))
            segment = Segment(slot=slot, tokens=torch.tensor(tokens), parents=np.array(parents), logits=which)
            found = lm.extend([segment]).logits.exp().numpy()
            wanted = {"all": paths[count:], "last": paths[-1:], "none": []}[which]
            assert found.shape == (len(wanted), 4)
            for row, path in zip(found, wanted, strict=True):
                np.testing.assert_allclose(row, rows_of([*text, *path], words), atol=1e-12)
        chosen = data.draw(st.integers(0, len(paths) - 1))
        numbers = [
            next(i for i, p in enumerate(paths) if p == paths[chosen][: n + 1]) for n in range(len(paths[chosen]))
        ]
        # Of siblings that say the same any may be meant, so the path is followed by parents.
        if all(a < b for a, b in pairwise(numbers)) and len({tuple(p) for p in paths}) == len(paths):
            lm.commit({slot: numbers})
            text += paths[chosen]
        else:
            lm.commit({slot: []})
        assert lm.length(slot) == len(text)
        kept = data.draw(st.integers(0, len(text)))
        lm.truncate(slot, kept)
        del text[kept:]
        assert lm.lm.length(slot) == sum(len(words.pieces(t)) for t in text) + (len(words.opening) if text else 0)


def test_beyond_the_context_rows_are_flat_and_lengths_go_on():
    lm = Translated(inner(max_context=6), WORDS)
    slot = lm.open()
    lm.extend([Segment(slot=slot, tokens=torch.tensor([2, 0]), logits="none")])
    lm.commit({slot: [0, 1]})
    found = lm.extend([Segment(slot=slot, tokens=torch.tensor([0, 3]))]).logits
    np.testing.assert_allclose(found[1].exp().numpy(), rows_of([2, 0, 0, 3]), atol=1e-12)
    lm.commit({slot: []})
    found = lm.extend([Segment(slot=slot, tokens=torch.tensor([1]))]).logits
    np.testing.assert_allclose(found[0].exp().numpy(), rows_of([2, 0, 1]), atol=1e-12)
    lm.commit({slot: [0]})
    assert (lm.length(slot), lm.lm.length(slot)) == (3, 6)
    found = lm.extend([Segment(slot=slot, tokens=torch.tensor([0, 3]))]).logits
    assert found.softmax(-1).tolist() == [[0.5, 0, 0, 0.5]] * 2
    lm.commit({slot: [0, 1]})
    assert (lm.length(slot), lm.lm.length(slot)) == (5, 6)
    lm.truncate(slot, 2)
    found = lm.extend([Segment(slot=slot, tokens=torch.tensor([3]))]).logits
    np.testing.assert_allclose(found[0].exp().numpy(), rows_of([2, 0, 3]), atol=1e-12)


class Strict(TabularLM):
    """Refuses more than its context holds, pending nodes included, as a real model does."""

    def extend(self, segments, taps=()):
        for segment in segments:
            used = self.length(segment.slot) + len(self._pending[segment.slot]) + len(segment.tokens)
            assert used <= self.max_context, f"{used} tokens in a context of {self.max_context}"
        return super().extend(segments, taps)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_tree_at_the_end_of_the_context_is_fed_as_far_as_it_fits(data):
    strict = Strict(random_rows(5, seed=4), 5, max_context=data.draw(st.integers(1, 9)))
    lm = Translated(strict, WORDS)
    slot = lm.open()
    length = 0
    for _ in range(4):
        count = data.draw(st.integers(1, 4))
        parents = [data.draw(st.integers(-1, i - 1)) for i in range(count)]
        tokens = torch.tensor([data.draw(st.integers(0, 3)) for _ in range(count)])
        found = lm.extend([Segment(slot=slot, tokens=tokens, parents=np.array(parents))]).logits.softmax(-1)
        assert ((found[:, [0, 3]].sum(-1) - 1).abs() < 1e-6).all()
        path = [data.draw(st.integers(0, count - 1))]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        lm.commit({slot: path})
        length += len(path)
        assert lm.length(slot) == length
        if data.draw(st.booleans()):
            length = data.draw(st.integers(0, length))
            lm.truncate(slot, length)
            assert lm.length(slot) == length


def test_a_translated_model_has_no_taps():
    with pytest.raises(ValueError, match="no taps"):
        Translated(inner(), WORDS).extend([], taps=[0])
