"""Texts on the device take in new tokens alone, and penalties read them as a whole text would be read."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.sampling import to_rows
from outrider.core.texts import Before, CommittedText, climbed, texts_table
from outrider.core.types import Sampling

VOCAB, CPU = 40, torch.device("cpu")
SAMPLINGS = [
    Sampling(repetition_penalty=1.3),
    Sampling(),
    Sampling(frequency_penalty=0.7, presence_penalty=0.4),
    Sampling(repetition_penalty=0.6, frequency_penalty=-0.2, logit_bias={3: 1.5, 7: -2.0}),
]


def plain(logits: torch.Tensor, sampling: Sampling, prompt: list[int], output: list[int]) -> torch.Tensor:
    """The penalties and biases by their definition, token by token."""
    scores = logits.tolist()
    counts = Counter(output)
    for token in {*prompt, *output}:
        factor = sampling.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token, count in counts.items():
        scores[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    for token, bias in sampling.logit_bias.items():
        scores[token] += bias
    return torch.tensor(scores, dtype=torch.float64).softmax(-1)


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=6)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6), steps=st.lists(tokens, min_size=1, max_size=4), data=st.data())
def test_rows_of_trees_are_penalised_by_their_definition_step_after_step(seed, steps, data):
    generator = torch.Generator().manual_seed(seed)
    prompts = [[5, 9, 5], [1], [7, 7], [0, 3]]
    committed = [list(prompt) for prompt in prompts]
    texts = [CommittedText(tokens=own, num_prompt=len(prompt)) for own, prompt in zip(committed, prompts, strict=True)]
    for more in steps:
        chosen = sorted(data.draw(st.sets(st.integers(0, 3), min_size=1)))
        for own in committed:
            own.extend(more)
        # A root with two children, the second of which has a child with the root's token.
        parents, depths = np.array([-1, 0, 0, 2]), np.array([0, 1, 1, 2])
        drafted = [[committed[i][-1], 4, 7, committed[i][-1]] for i in chosen]
        nodes = np.concatenate([4 * k + climbed(np.arange(4), parents, depths) for k in range(len(chosen))])
        logits = torch.randn(4 * len(chosen), VOCAB, dtype=torch.float64, generator=generator)
        owners = np.repeat(np.arange(len(chosen)), 4)
        before = Before(
            texts=[texts[i] for i in chosen],
            owners=owners,
            tokens=torch.tensor(drafted).flatten(),
            paths=nodes,
            lengths=np.tile(depths, len(chosen)),
        )
        rows = to_rows(logits, owners, [SAMPLINGS[i] for i in chosen], [before].pop)
        for k, i in enumerate(chosen):
            for node, path in enumerate(([], [4], [7], [7, drafted[k][3]])):
                output = [*committed[i][len(prompts[i]) :], *path]
                expected = plain(logits[4 * k + node], SAMPLINGS[i], prompts[i], output)
                # A presence penalty is a float32 in torch.
                torch.testing.assert_close(rows[4 * k + node], expected, rtol=1e-6, atol=1e-9)


def test_a_step_uploads_new_tokens_alone(monkeypatch):
    texts = [CommittedText(tokens=list(range(30)), num_prompt=30), CommittedText(tokens=[1, 2], num_prompt=1)]
    texts_table(texts, CPU, VOCAB, counted=True)
    sizes = []
    monkeypatch.setattr(
        "outrider.core.texts.upload", lambda array, _: sizes.append(len(array)) or torch.from_numpy(array)
    )
    texts_table(texts, CPU, VOCAB, counted=True)
    assert sizes == []
    texts[0].tokens.append(3)
    texts[1].tokens.extend([7, 2])
    table = texts_table(texts, CPU, VOCAB, counted=True)
    # The place and the number of one new token, and three tokens to count.
    assert sizes == [5]
    assert table.counts.sum(1).tolist() == [1, 3]
    assert table.counts[1, 2] == 2
    assert set(table.ids[1].tolist()) == {1, 2, 7}


@pytest.mark.parametrize("length", [63, 64, 65, 300])
def test_the_room_for_tokens_grows(length):
    text = CommittedText(tokens=[0], num_prompt=1)
    texts_table([text], CPU, 400, counted=False)
    text.tokens.extend(range(1, length))
    assert set(texts_table([text], CPU, 400, counted=False).ids[0].tolist()) == set(range(length))


def test_a_text_that_goes_on_elsewhere_leaves_the_first_as_it_is():
    text = CommittedText(tokens=[4, 5], num_prompt=1)
    texts_table([text], CPU, VOCAB, counted=True)
    other = texts_table([text.followed_by([4, 5, 6])], CPU, VOCAB, counted=True)
    assert set(other.ids[0].tolist()) == {4, 5, 6}
    assert set(texts_table([text], CPU, VOCAB, counted=True).ids[0].tolist()) == {4, 5}


def test_a_whole_text_grows_with_its_tokens():
    text = CommittedText(tokens=[4, 5], num_prompt=1)
    assert text.whole(CPU).tolist() == [4, 5]
    text.tokens.extend(range(10))
    assert text.whole(CPU).tolist() == text.tokens
