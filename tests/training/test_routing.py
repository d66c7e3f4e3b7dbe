"""Clusters of prompts, and the routes that they make."""

import numpy as np
import pytest
import torch

from outrider.core.inputs import InputError
from outrider.core.types import Request, Sampling
from outrider.training.online.routing import Clusters
from outrider.verifiers.token import TokenVerifier
from tests.world.models import target
from tests.world.tables import tables


def texts(kinds: int, count: int, seed: int = 0) -> list[tuple[int, list[int]]]:
    """Prompts of some kinds in random order. Each kind has tokens of its own."""
    dice = np.random.default_rng(seed)
    order = [*range(kinds), *dice.integers(kinds, size=count).tolist()]
    return [(kind, (10 * kind + dice.integers(10, size=12)).tolist()) for kind in order]


@pytest.mark.parametrize("kinds", [1, 2, 3])
def test_prompts_of_one_kind_come_into_one_cluster(kinds):
    clusters = Clusters(lambda tokens: torch.eye(40)[tokens], count=kinds)
    found = [(kind, clusters.cluster(prompt)) for kind, prompt in texts(kinds, 60)]
    assert len(set(found)) == kinds
    assert len({cluster for _, cluster in found}) == kinds


def test_the_same_prompts_are_always_put_into_the_same_clusters():
    lm = target()
    prompts = [prompt for _, prompt in texts(3, 30)]
    first, second = (list(map(Clusters.of(lm, 3).cluster, prompts)) for _ in range(2))
    assert first == second
    assert set(first) <= {0, 1, 2}


def test_prompts_that_are_all_alike_fill_one_cluster():
    clusters = Clusters(lambda tokens: torch.eye(4)[tokens], count=3)
    request = Request(id="a", prompt=(1, 2), max_new_tokens=1, sampling=Sampling())
    assert [clusters(request) for _ in range(5)] == [0] * 5


def test_a_target_without_embeddings_is_refused():
    with pytest.raises(InputError, match="does not show its embeddings"):
        Clusters.of(tables(3, TokenVerifier()).target, 2)
    with pytest.raises(InputError, match="must be >= 1, got 0"):
        Clusters(lambda tokens: torch.eye(4)[tokens], count=0)
