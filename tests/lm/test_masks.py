"""Masks and positions of trees, against their definitions."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.lm.hf.anatomy import Anatomy, Span
from outrider.lm.slots.masks import MaskBuilder, look
from outrider.lm.slots.slots import Pending
from tests.world.zoo import tiny


@st.composite
def rows(draw: st.DrawFn) -> list[tuple[int, list[list[int]]]]:
    """For each row of a batch its committed length and the parents of each call's nodes; only the last may be long."""
    result = []
    for _ in range(draw(st.integers(1, 3))):
        total, calls = 0, []
        for _ in range(draw(st.integers(1, 3))):
            size = draw(st.integers(1, 4))
            calls.append([draw(st.integers(-1, total + i - 1)) for i in range(size)])
            total += size
        result.append((draw(st.integers(0, 20)), calls))
    return result


def pending(calls: list[list[int]]) -> Pending:
    found = Pending()
    for parents in calls:
        found = found.grown(len(parents), np.array(parents))
    return found


def root_path(parents: list[int], node: int) -> list[int]:
    return ([] if parents[node] < 0 else root_path(parents, parents[node])) + [node]


@given(rows(), st.sampled_from([Span(), Span(window=3), Span(chunk=4)]), st.integers(0, 2))
def test_a_node_sees_committed_tokens_its_ancestors_and_itself_within_its_span(
    batch: list[tuple[int, list[list[int]]]], span: Span, padding: int
) -> None:
    pendings = [pending(calls) for _, calls in batch]
    counts = np.array([len(calls[-1]) for _, calls in batch])
    width = int(counts.max()) + padding
    view = max(length + len(p) for (length, _), p in zip(batch, pendings, strict=True)) + 2
    sight = look([length for length, _ in batch], pendings, counts, width)
    builder = MaskBuilder(spans=span, additive=None, device=torch.device("cpu"))
    masks = builder.masks(sight, torch.from_numpy(sight.positions), view)
    for r, (length, calls) in enumerate(batch):
        parents = [parent for call in calls for parent in call]
        first = len(parents) - len(calls[-1])
        for column in range(width):
            node = min(first + column, len(parents) - 1)
            path = root_path(parents, node)
            position = length + len(path) - 1
            keys = [(k, k) for k in range(length)] + [(length + n, length + d) for d, n in enumerate(path)]
            near = [
                k
                for k, at in keys
                if (span.window is None or at > position - span.window)
                and (span.chunk is None or at // span.chunk == position // span.chunk)
            ]
            assert sight.positions[r, column] == position
            assert masks[r, 0, column].nonzero().flatten().tolist() == near


def test_additive_masks_hold_zero_and_the_lowest_number() -> None:
    sight = look([1], [Pending().grown(2, np.array([-1, -1]))], np.array([2]), 2)
    builder = MaskBuilder(spans={"full_attention": Span()}, additive=torch.bfloat16, device=torch.device("cpu"))
    masks = builder.masks(sight, torch.from_numpy(sight.positions), 3)
    low = torch.finfo(torch.bfloat16).min
    assert masks["full_attention"].tolist() == [[[[0.0, 0.0, low], [0.0, low, 0.0]]]]
    assert masks["full_attention"].dtype == torch.bfloat16


def test_a_chain_given_by_parents_is_a_chain() -> None:
    assert Pending().grown(2, None).grown(2, np.array([1, 2])).chain
    assert not Pending().grown(2, None).grown(2, np.array([0, 2])).chain


def test_models_take_a_dict_of_masks_where_their_layers_have_types() -> None:
    assert Anatomy.of(tiny("gemma3")).spans == {"sliding_attention": Span(window=8), "full_attention": Span()}
    assert Anatomy.of(tiny("llama4")).spans == {"chunked_attention": Span(chunk=8), "full_attention": Span()}
    assert Anatomy.of(tiny("mistral")).spans == Span(window=8)
    assert Anatomy.of(tiny("llama")).spans == Span()


def test_a_window_in_the_config_of_a_model_that_has_none_is_ignored_as_the_model_does() -> None:
    model = tiny("llama")
    model.config.sliding_window = 8
    assert Anatomy.of(model).spans == Span()
