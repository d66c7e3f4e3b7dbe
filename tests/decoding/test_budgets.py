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
from tests.world.card import Counts, Gpu, gpu, unplugged
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
    "greedy": Sampling(temperature=0.0, repetition_penalty=1.1),
    "bias": Sampling(logit_bias={5: 2.0, 9: -float("inf")}),
    "top_p": Sampling(temperature=0.6, top_p=0.9),
    "top_k": Sampling(temperature=0.6, top_k=20),
    "min_p": Sampling(min_p=0.05),
    "all": Sampling(temperature=0.7, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.05, presence_penalty=0.1),
}
GREEDY_CHAIN, SAMPLED_CHAIN, TREE = 60, 150, 300
"""Operations outside models."""
ABOVE = {
    # Each of six sets of rows needs operations of its own for each option, however many requests there are.
    "repetition": 205,
    "penalties": 290,
    "greedy": 270,
    "top_p": 180,
    "top_k": 160,
    "min_p": 160,
    "all": 420,
    "mixed": 520,
    # A head of three layers with a cache each, of which every layer reads what it has missed.
    "mtp": 180,
    "poss": 165,
    # Its recurrent layer reads each draft token.
    "domino": 155,
    # It needs the target's rows at temperature 0 too.
    "lenient at temperature 0": 80,
    # Rules that weigh the rows of each depth of a tree against each other. How many depths a beam branches at varies.
    "iid-kseq": 540,
    "gumbel-traversal": 375,
    "beam-recursive": 400,
    "beam-traversal": 640,
    "fixed-traversal": 375,
}
"""Cells that need more operations than their kind may have, and the most that they may have. A change that makes one of
them smaller lowers its number, or takes the cell out.
"""
WAITS = {
    # A lossy rule that chooses a path on the host and draws behind it.
    "typical": 2,
    # The paths' ranks decide on the host which of them is verified; that is two copies and one for each level.
    "iid-multipath": 7,
    # The tokens of two drafts are read on the host, where they become one tree.
    "union": 4,
}
"""Cells that wait more often than their kind may."""
GRAMMAR = 260
"""Operations outside models of a chain whose levels are masked one by one."""
EXPERIMENTS = ("greedy_block",)
"""Verifiers that follow their rows on the host, and wait at each of them."""


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
    prompts = [[5, 6, 7, 5, 6], [30, 31]]
    settings = [replace(sampling, seed=seed) for seed in range(len(prompts))]
    made = [out.tokens for out in busy.generate(prompts, max_new_tokens=8, sampling=settings)]
    busy.rest()
    return made


def check(counted: Sequence[Counts], *, waits: int, operations: int) -> None:
    """Every step stays within a budget, and no row of logits or probabilities goes to the host."""
    for counts in counted:
        assert counts.in_models > 0, counts
        assert counts.synchronisations <= waits, counts
        assert counts.operations <= operations, counts
        assert counts.largest_copy < VOCAB, counts


def check_chains(counted: Sequence[Counts], sampling: Sampling, name: str = "") -> None:
    """The budget of chains."""
    usual = GREEDY_CHAIN if sampling.temperature == 0 else SAMPLED_CHAIN
    check(counted, waits=WAITS.get(name, 1), operations=ABOVE.get(name, usual))


def test_only_cells_that_need_it_have_more_than_the_usual_budget():
    cells = {*catalog.rows("drafter"), *OPTIONS, *(case.id for case in TREE_CASES), "mixed", "lenient at temperature 0"}
    assert ABOVE.keys() <= cells
    assert min(ABOVE.values()) > GREEDY_CHAIN


@pytest.mark.parametrize("name", catalog.rows("drafter"))
def test_chains_of_every_drafter(card, target, folder, name):
    own = target_of(name, folder) if name == OF_ITS_OWN_TARGET else target
    # A union is a tree.
    busy = engine(own, drafter_of(name, own, folder), verifier="traversal" if name == "union" else "block")
    check_chains(steps(card, busy, [GREEDY]), GREEDY, name if name == "union" else "")
    check_chains(steps(card, busy, [SAMPLED] * 8), SAMPLED, name)


@pytest.mark.parametrize("name", [name for name, made in (LOSSLESS | LOSSY).items() if "sampled chain" in made.kinds])
def test_chains_with_every_verifier(card, target, model, name):
    busy = engine(target, model, verifier=name)
    greedy, sampled = (steps(card, busy, [sampling] * 8) for sampling in (GREEDY, SAMPLED))
    if name in EXPERIMENTS:
        assert all(0 < counts.largest_copy < VOCAB for counts in [*greedy, *sampled])
        return
    check(greedy, waits=WAITS.get(name, 1), operations=ABOVE.get(f"{name} at temperature 0", GREEDY_CHAIN))
    check_chains(sampled, SAMPLED, name)


def test_chains_of_many_requests(card, target, model):
    for sampling in (GREEDY, SAMPLED):
        check_chains(steps(card, engine(target, model), [sampling] * SLOTS), sampling)


@pytest.mark.parametrize("name", OPTIONS)
def test_chains_with_every_sampling_option(card, target, model, on_cpu, name):
    busy = engine(target, model)
    check_chains(steps(card, busy, [OPTIONS[name]] * 8), OPTIONS[name], name)
    made = texts(busy, OPTIONS[name])
    with unplugged():
        assert made == texts(engine(*on_cpu), OPTIONS[name])


def test_requests_with_different_settings_in_one_batch(card, target, model):
    mixed = [GREEDY, SAMPLED, *OPTIONS.values()] * 3
    check_chains(steps(card, engine(target, model), mixed), SAMPLED, "mixed")


def test_log_probabilities_of_all_requests_are_one_copy_more(card, target, model):
    busy = engine(target, model)
    check(steps(card, busy, [GREEDY] * 8, logprobs=3), waits=2, operations=GREEDY_CHAIN)


def test_top_p_over_a_wide_vocabulary(card):
    own = on_card(llama(vocab=40960), max_slots=2)
    busy = engine(own, catalog.make("drafter", "suffix"))
    check_chains(steps(card, busy, [OPTIONS["top_p"]] * 2), OPTIONS["top_p"])


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["T0", "T1"])
def test_a_grammar_waits_for_the_tokens_of_each_level(card, target, model, sampling):
    # The host's grammar must know a token before it can say what may follow it: once for the root and once for each
    # level of the draft, once for all of the draft before the target's masks, and once for what was accepted.
    rule = After(vocab=VOCAB, followers={5: frozenset(range(6, 90)), 7: frozenset({8, 9})})
    counted = steps(card, engine(target, model), [sampling] * 2, constraint=rule)
    check(counted, waits=DEPTH + 2, operations=GRAMMAR)


TREE_CASES = [
    pytest.param(TREES.get(name, name), rule, id=f"{name}-{rule}")
    for name in catalog.rows("tree")
    if (structure := catalog.make("tree", TREES.get(name, name)).structure) != "chain"
    for rule, made in LOSSLESS.items()
    if KINDS[structure] in made.kinds
]


@pytest.mark.parametrize(("tree", "verifier"), TREE_CASES)
def test_every_tree_with_every_verifier(card, target, model, on_cpu, tree, verifier):
    rules = {"tree": tree, "verifier": verifier, "length": f"fixed:{LEVELS}"}
    busy, name = engine(target, model, **rules), f"{tree.partition(':')[0]}-{verifier}"
    for sampling, batch in ((GREEDY, 1), (SAMPLED, 8)):
        # One copy of each level's tokens, which the host arranges, and one of what was accepted.
        counted = steps(card, busy, [sampling] * batch, warm=1)
        check(counted, waits=WAITS.get(name, LEVELS + 1), operations=ABOVE.get(name, TREE))
    made = texts(busy, SAMPLED)
    with unplugged():
        assert made == texts(engine(*on_cpu, **rules), SAMPLED)
