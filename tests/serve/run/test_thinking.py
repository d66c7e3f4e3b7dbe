"""A constraint behind the reasoning: the masks of a draft are those of plain decoding, node by node."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from jaxtyping import Int
from torch import Tensor

from outrider.serve.run.thinking import BehindThinking

VOCAB, END, OPEN, CLOSE = 70, 31, 5, 63
WORDS = -(-VOCAB // 32)


def packed(allowed: Sequence[int]) -> Int[Tensor, " words"]:
    row = np.zeros(WORDS * 32, dtype=np.uint8)
    row[list(allowed)] = 1
    return torch.from_numpy(np.packbits(row, bitorder="little").view(np.int32).copy())


def unpacked(row: Int[Tensor, " words"]) -> set[int]:
    bits = np.unpackbits(row.numpy().view(np.uint8), bitorder="little")[:VOCAB]
    return set(np.flatnonzero(bits).tolist())


@dataclass(frozen=True)
class Steps:
    """Allows tokens by the sum of those before."""

    def open(self) -> list[int]:
        return []

    def allowed(self, text: Sequence[int]) -> list[int]:
        return [token for token in range(VOCAB) if (token + sum(text)) % 3 == 0]

    def masks(self, state: object, tokens: Sequence[int], parents: Sequence[int]) -> Int[Tensor, "nodes words"]:
        assert isinstance(state, list)
        paths: list[list[int]] = []
        for token, parent in zip(tokens, parents, strict=True):
            paths.append([] if parent < 0 else [*paths[parent], token])
        return torch.stack([packed(self.allowed([*state, *path])) for path in paths])

    def commit(self, state: object, tokens: Sequence[int]) -> None:
        assert isinstance(state, list)
        state.extend(tokens)


def made(*, opens: int | None, closes: tuple[int, ...], inside: bool) -> BehindThinking:
    return BehindThinking(
        inner=Steps(), opens=opens, closes=closes, inside=inside, eos_ids=frozenset({END}), num_words=WORDS
    )


def by_definition(rule: BehindThinking, text: Sequence[int]) -> set[int]:
    """The tokens that may follow an output."""
    free = set(range(VOCAB)) - {END}
    rest = list(text)
    if not rule.inside:
        if not rest or rest[0] != rule.opens or rule.opens is None:
            begins = {rule.opens} if not rest and rule.opens is not None else set()
            return set(Steps().allowed(rest)) | begins
        rest = rest[1:]
        # The token that opens is no part of the close.
        text = [rule.opens]
    else:
        text = []
    size = len(rule.closes)
    for i in range(1, len(rest) + 1):
        if tuple([*text, *rest[:i]][-size:]) == rule.closes:
            return set(Steps().allowed(rest[i:]))
    return free


RULES = [
    made(opens=OPEN, closes=(CLOSE,), inside=False),
    made(opens=None, closes=(CLOSE,), inside=False),
    made(opens=OPEN, closes=(CLOSE,), inside=True),
    made(opens=OPEN, closes=(7, CLOSE), inside=True),
    made(opens=OPEN, closes=(7, 7, CLOSE), inside=False),
]


@pytest.mark.parametrize("rule", RULES, ids=range(len(RULES)))
@pytest.mark.parametrize("seed", range(20))
def test_masks_of_a_draft_are_those_of_plain_decoding(rule: BehindThinking, seed: int) -> None:
    dice = np.random.default_rng(seed)
    likely = [OPEN, CLOSE, 7, 7, 3, 40]

    def drawn(size: int) -> list[int]:
        return [int(dice.choice(likely)) for _ in range(size)]

    committed = drawn(int(dice.integers(0, 6)))
    if rule.opens is not None and not rule.inside and dice.random() < 0.7:
        committed = [rule.opens, *committed][: int(dice.integers(0, 6))]
    state = rule.open()
    where = 0
    while where < len(committed):
        size = int(dice.integers(1, 4))
        rule.commit(state, committed[where : where + size])
        where += size
    tokens, parents, paths = [committed[-1] if committed else 0], [-1], [committed]
    for token in drawn(12):
        parent = int(dice.integers(0, len(tokens)))
        tokens.append(token)
        parents.append(parent)
        paths.append([*paths[parent], token])
    masks = rule.masks(state, tokens, parents)
    for row, path in zip(masks, paths, strict=True):
        assert unpacked(row) == by_definition(rule, path), path


def test_an_output_that_does_not_reason_is_under_the_constraint_from_its_first_token() -> None:
    rule = RULES[0]
    [row] = rule.masks(rule.open(), [0], [-1])
    assert unpacked(row) == set(Steps().allowed([])) | {OPEN}


def test_reasoning_cannot_end_the_output() -> None:
    rule = RULES[2]
    [row] = rule.masks(rule.open(), [0], [-1])
    assert unpacked(row) == set(range(VOCAB)) - {END}
