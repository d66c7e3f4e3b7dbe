"""What a step asks of a GPU stays within budgets, for all methods of the catalog. Counted without one: see
`tests.world.card`. Nothing here is a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from outrider import catalog
from outrider.core.types import Sampling
from outrider.drafters.protocol import Drafter
from outrider.engine.engine import Engine
from outrider.lm.model import LanguageModel
from outrider.verifiers.traits import KINDS
from tests.decoding.gpu_steps import (
    DEPTH,
    SLOTS,
    VOCAB,
    drafter_of,
    engine,
    llama,
    on_card,
    steps,
    target_of,
    write_drafters,
)
from tests.world.automaton import After
from tests.world.card import Counts, Gpu, gpu
from tests.world.heads import OF_ITS_OWN_TARGET
from tests.world.verifiers import LOSSLESS, LOSSY

GREEDY, SAMPLED = Sampling(temperature=0.0), Sampling(temperature=1.0)
LEVELS = 3
"""Depth of the trees."""
TREES = {
    "iid": "iid:num_paths=5",
    "gumbel": "gumbel:branching=3x2x1",
    "beam": "beam:width=5",
    "top_plus_one": "top_plus_one:width=2",
    "dynamic": "dynamic:width=4,num_nodes=15",
    "lattice": "lattice:num_nodes=15",
    "fixed": "fixed:children=3x2x2x1x1x1x1x1",
    "opt": "opt:num_nodes=15",
}
"""Trees of at most 15 nodes below their roots. Others are as their defaults make them."""
OPTIONS = {
    "repetition": Sampling(repetition_penalty=1.1),
    "penalties": Sampling(repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.3),
    "bias": Sampling(logit_bias={5: 2.0, 9: -float("inf")}),
    "top_p": Sampling(temperature=0.6, top_p=0.9),
    "top_k": Sampling(temperature=0.6, top_k=20),
    "min_p": Sampling(min_p=0.05),
    "all": Sampling(temperature=0.7, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.05, presence_penalty=0.1),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("drafters")
    write_drafters(place)
    return place


@pytest.fixture(scope="module")
def card(folder: Path) -> Iterator[Gpu]:
    with gpu() as plugged:
        yield plugged


@pytest.fixture(scope="module")
def target(card: Gpu) -> LanguageModel:
    return on_card(llama())


@pytest.fixture(scope="module")
def model(target: LanguageModel, folder: Path) -> Drafter:
    return drafter_of("model", target, folder)


@pytest.fixture(scope="module")
def on_cpu(card: Gpu, folder: Path) -> tuple[LanguageModel, Drafter]:
    """The same target and draft model on the CPU."""
    own = LanguageModel(llama(), max_slots=SLOTS, max_context=256)
    return own, drafter_of("model", own, folder)


def texts(busy: Engine, sampling: Sampling) -> list[list[int]]:
    """What an engine generates with fixed seeds; the rules for a GPU's tensors must say what those for a CPU's say."""
    prompts = [[5, 6, 7, 5, 6], [9, 8, 7, 6], [30, 31]]
    settings = [replace(sampling, seed=seed) for seed in range(len(prompts))]
    return [out.tokens for out in busy.generate(prompts, max_new_tokens=12, sampling=settings)]


def check(counted: Sequence[Counts], *, waits: int, operations: int, uploads: int | None = None) -> None:
    """Every step stays within a budget, and no row of logits or probabilities goes to the host."""
    for counts in counted:
        assert counts.in_models > 0, counts
        assert counts.synchronisations <= waits, counts
        assert counts.operations <= operations, counts
        assert counts.largest_copy < VOCAB, counts
        assert uploads is None or counts.uploads <= uploads, counts


def check_chains(counted: Sequence[Counts], sampling: Sampling) -> None:
    """The budget of chains."""
    check(counted, waits=1, operations=60 if sampling.temperature == 0 else 150)


@pytest.mark.parametrize("name", catalog.rows("drafter"))
def test_chains_of_every_drafter(card, target, folder, name):
    own = target_of(name, folder) if name == OF_ITS_OWN_TARGET else target
    busy = engine(own, drafter_of(name, own, folder))
    for sampling, batch in ((GREEDY, 1), (SAMPLED, 8)):
        check_chains(steps(card, busy, [sampling] * batch), sampling)


@pytest.mark.parametrize("name", [name for name, made in (LOSSLESS | LOSSY).items() if "sampled chain" in made.kinds])
def test_chains_with_every_verifier(card, target, model, name):
    for sampling, batch in ((GREEDY, 8), (SAMPLED, 1), (SAMPLED, 32)):
        check_chains(steps(card, engine(target, model, verifier=name), [sampling] * batch), sampling)


@pytest.mark.parametrize("name", OPTIONS)
def test_chains_with_every_sampling_option(card, target, model, on_cpu, name):
    busy = engine(target, model)
    for batch in (1, 8, 32):
        check_chains(steps(card, busy, [OPTIONS[name]] * batch), OPTIONS[name])
    assert texts(busy, OPTIONS[name]) == texts(engine(*on_cpu), OPTIONS[name])


def test_chains_at_temperature_0_with_penalties(card, target, model):
    penalised = Sampling(temperature=0.0, repetition_penalty=1.1)
    for batch in (1, 8, 32):
        check(steps(card, engine(target, model), [penalised] * batch), waits=1, operations=150)


def test_requests_with_different_settings_in_one_batch(card, target, model):
    mixed = [GREEDY, SAMPLED, *OPTIONS.values()]
    check_chains(steps(card, engine(target, model), mixed), SAMPLED)


def test_top_p_over_a_wide_vocabulary(card):
    own = on_card(llama(vocab=40960), max_slots=2)
    busy = engine(own, catalog.make("drafter", "suffix"))
    check_chains(steps(card, busy, [OPTIONS["top_p"]] * 2), OPTIONS["top_p"])


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["T0", "T1"])
def test_a_grammar_waits_for_the_tokens_of_each_level(card, target, model, sampling):
    # The host's grammar must know a token before it can say what may follow it.
    rule = After(vocab=VOCAB, followers={5: frozenset(range(6, 90)), 7: frozenset({8, 9})})
    counted = steps(card, engine(target, model), [sampling] * 2, constraint=rule)
    check(counted, waits=DEPTH + 1, operations=150)


def _trees() -> list:
    found = []
    for name in catalog.rows("tree"):
        tree = catalog.make("tree", TREES.get(name, name))
        if tree.structure == "chain":
            continue
        kind = KINDS[tree.structure]
        found += [
            pytest.param(TREES.get(name, name), rule, id=f"{name}-{rule}")
            for rule, made in (LOSSLESS | LOSSY).items()
            if kind in made.kinds
        ]
    return found


@pytest.mark.parametrize(("tree", "verifier"), _trees())
def test_every_tree_with_every_verifier(card, target, model, on_cpu, tree, verifier):
    rules = {"tree": tree, "verifier": verifier, "length": f"fixed:{LEVELS}"}
    busy = engine(target, model, **rules)
    for sampling, batch in ((GREEDY, 1), (SAMPLED, 8)):
        check(steps(card, busy, [sampling] * batch, count=2), waits=LEVELS, operations=300)
    assert texts(busy, SAMPLED) == texts(engine(*on_cpu, **rules), SAMPLED)
