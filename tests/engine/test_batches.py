"""Requests of a batch get what they get alone, whoever runs beside them; slots, ends and seeds."""

from functools import cache

import numpy as np
import pytest
import torch

from outrider import catalog
from outrider.core.types import Request, Sampling
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.none import NoDrafter
from outrider.engine.engine import Engine
from outrider.lengths.fixed import FixedLength
from outrider.lengths.heuristic import HeuristicLength
from outrider.lengths.tetris import TetrisLength
from outrider.lm.model import LanguageModel
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.match import MatchVerifier
from outrider.verifiers.token import TokenVerifier
from tests.world.parts import parts_of
from tests.world.zoo import VOCAB, tiny

pytestmark = pytest.mark.usefixtures("float64_stays_float64")

SETTINGS = [
    Sampling(temperature=0.0),
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=12),
    Sampling(temperature=1.3, top_p=0.8),
    Sampling(temperature=0.9, min_p=0.05),
    Sampling(temperature=0.0, repetition_penalty=1.3),
    Sampling(temperature=1.0, frequency_penalty=0.4, presence_penalty=0.3),
    Sampling(temperature=0.8, logit_bias={5: 2.0, 9: -3.0}),
]
CELLS = {
    "model-block-fixed": ("model", BlockVerifier(), FixedLength(num_speculative_tokens=4)),
    "model-token-heuristic": ("model", TokenVerifier(), HeuristicLength(num_speculative_tokens=3)),
    "model-match-fixed": ("model", MatchVerifier(), FixedLength(num_speculative_tokens=3)),
    "ngram-block-fixed": ("ngram", BlockVerifier(), FixedLength(num_speculative_tokens=4)),
}


TREES = {
    "iid:num_paths=3": "recursive",
    "iid:num_paths=2": "kseq",
    "iid:num_paths=4": "multipath",
    "iid:num_paths=3,dedup=true": "traversal",
    "gumbel:branching=3x2x1": "traversal",
    "beam:width=3": "recursive",
    "top_plus_one:width=2": "top_plus_one",
    "dynamic:width=3,num_nodes=8": "match",
    "lattice:num_nodes=8": "match",
    "opt:num_nodes=8,threshold=0.1": "match",
    "fixed:children=3x1x0x2": "traversal",
}


def engine(
    drafter: str, verifier, length, max_slots: int = 8, draft_context: int | None = None, tree: str = "chain"
) -> Engine:
    guesser = {"ngram": NgramDrafter(prompt_lookup_min=1), "none": NoDrafter()}.get(drafter)
    if guesser is None:
        # Another seed would never agree; one layer fewer of the same weights sometimes does.
        draft = tiny("llama")
        draft.model.layers = draft.model.layers[:2]
        draft.config.num_hidden_layers = 2
        guesser = ModelDrafter(lm=LanguageModel(draft, max_slots=max_slots, max_context=draft_context))
    target = LanguageModel(tiny("llama"), max_slots=max_slots)
    parts = parts_of(target, guesser, tree=tree, verifier=verifier, length=length)
    return Engine(parts, max_slots=max_slots)


def requests() -> list[Request]:
    random = np.random.default_rng(3)
    return [
        Request(
            id=str(i),
            prompt=tuple(random.integers(3, VOCAB, size=size).tolist()),
            max_new_tokens=most,
            sampling=type(setting)(**{**vars(setting), "seed": 100 + i}),
            eos_ids=frozenset() if i in (2, 3) else frozenset({7} if i % 2 == 0 else {7, 11, 20}),
        )
        for i, (setting, size, most) in enumerate(
            zip(SETTINGS, (1, 17, 4, 30, 9, 2, 23, 12), (24, 5, 30, 18, 1, 26, 12, 22), strict=True)
        )
    ]


@cache
def alone(cell: str) -> list[list[int]]:
    """What each request gets in an engine of its own."""
    return [run(engine(*CELLS[cell]), [request])[0] for request in requests()]


def run(engine_: Engine, these: list[Request], late: int = 0) -> list[list[int]]:
    """Tokens of each request; one request joins per step from `late` on."""
    found: dict[str, list[int]] = {}
    waiting = list(these)
    for _ in range(late or len(waiting)):
        engine_.add(waiting.pop(0))
    while engine_.busy or waiting:
        if waiting:
            engine_.add(waiting.pop(0))
        for update in engine_.step():
            if update.output is not None:
                found[update.id] = update.output.tokens
    return [found[request.id] for request in these]


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(("slots", "late"), [(8, 0), (3, 0), (8, 1), (4, 2)])
def test_a_ragged_batch_gives_each_request_what_it_gets_alone(cell, slots, late):
    drafter, verifier, length = CELLS[cell]
    assert run(engine(drafter, verifier, length, max_slots=slots), requests(), late) == alone(cell)


@pytest.mark.parametrize("tree", TREES)
def test_a_ragged_batch_of_trees_gives_each_request_what_it_gets_alone(tree):
    rule, length = catalog.make("verifier", TREES[tree]), FixedLength(num_speculative_tokens=3)
    single = [run(engine("model", rule, length, tree=tree), [request])[0] for request in requests()]
    for slots, late in ((8, 0), (3, 2)):
        assert run(engine("model", rule, length, max_slots=slots, tree=tree), requests(), late) == single


@pytest.mark.parametrize("length", ["adaedl:num_speculative_tokens=5", "svip:num_speculative_tokens=5", "planned"])
def test_a_stopping_rule_stops_each_request_by_itself(length):
    policy = catalog.make("length", length)
    single = [run(engine("model", BlockVerifier(), policy), [request])[0] for request in requests()]
    assert run(engine("model", BlockVerifier(), policy, max_slots=4), requests(), 2) == single


def test_a_shared_budget_is_kept_in_every_step_of_a_batch():
    busy = engine("model", BlockVerifier(), TetrisLength(num_speculative_tokens=2, extra=2))
    for request in requests():
        busy.add(request)
    seen = []
    while busy.busy:
        steps = []
        busy.step(sink=steps.append)
        seen += [(sum(s.num_draft_tokens for s in steps), len(steps), [s.num_draft_tokens for s in steps])]
    assert all(drafted <= 2 * count for drafted, count, _ in seen)
    assert any(max(lengths) > 2 > min(lengths) for _, count, lengths in seen if count > 1)


@pytest.mark.parametrize("cell", CELLS)
def test_cancelling_some_changes_nothing_for_the_others(cell):
    busy = engine(*CELLS[cell])
    these = requests()
    for request in these:
        busy.add(request)
    found: dict[str, list[int]] = {}
    for round_ in range(1000):
        if round_ == 2:
            assert busy.cancel("2").finish_reason == "cancelled"
        if round_ == 3:
            busy.cancel("3")
        for update in busy.step():
            if update.output is not None:
                found[update.id] = update.output.tokens
        if not busy.busy:
            break
    assert busy.cancel("2") is None
    for request, tokens in zip(these, alone(cell), strict=True):
        if request.id not in ("2", "3"):
            assert found[request.id] == tokens, request.id


@pytest.mark.parametrize("cell", CELLS)
def test_greedy_requests_equal_plain_decoding(cell):
    plain = engine("none", TokenVerifier(), FixedLength())
    these = [request for request in requests() if request.sampling.temperature == 0]
    assert run(engine(*CELLS[cell]), these) == run(plain, these)


def test_slots_are_given_back_and_used_again():
    small = engine("model", BlockVerifier(), FixedLength(num_speculative_tokens=2), max_slots=4)
    prompts = np.random.default_rng(1).integers(3, VOCAB, size=(100, 5)).tolist()
    outputs = small.generate(prompts, max_new_tokens=3, sampling=Sampling(temperature=0.5, seed=1))
    small.rest()
    assert [len(output.tokens) for output in outputs] == [3] * 100
    for lm in (small.parts.target, small.parts.drafter.lm):
        slots = [lm.open() for _ in range(4)]
        assert sorted(slots) == [0, 1, 2, 3]


def test_a_prompt_that_continues_the_last_one_prefills_only_what_is_new():
    warm, cold = (engine("model", BlockVerifier(), FixedLength(num_speculative_tokens=3)) for _ in range(2))
    greedy = Sampling(temperature=0.0, seed=0)
    prompt = list(range(3, 40))
    [first] = warm.generate([prompt], max_new_tokens=10, sampling=greedy)
    longer = [*prompt, *first.tokens, 5, 6]
    warm.add(longer, max_new_tokens=10, sampling=greedy)
    while warm.busy:
        for update in warm.step():
            second = update.output or None
    assert second.reused_tokens == warm.num_reused_tokens >= len(prompt) + len(first.tokens) - 1
    assert second.tokens == cold.generate([longer], max_new_tokens=10, sampling=greedy)[0].tokens


def test_a_shorter_draft_context_ends_drafting_not_the_output():
    greedy = Sampling(temperature=0.0, seed=0)
    short = engine("model", BlockVerifier(), FixedLength(num_speculative_tokens=3), draft_context=24)
    prompt = list(range(3, 15))
    [drafted] = short.generate([prompt], max_new_tokens=40, sampling=greedy)
    [plain] = short.plain().generate([prompt], max_new_tokens=40, sampling=greedy)
    assert drafted.tokens == plain.tokens
    assert len(drafted.tokens) == 40
    assert 0 < drafted.num_draft_tokens < 3 * 40


def test_the_output_ends_where_the_context_does():
    full = engine("model", BlockVerifier(), FixedLength(num_speculative_tokens=4))
    longest = full.parts.target.max_context
    prompt = np.random.default_rng(5).integers(3, VOCAB, size=longest - 7).tolist()
    [output] = full.generate([prompt], max_new_tokens=50, sampling=Sampling(temperature=0.0, seed=0))
    assert (len(output.tokens), output.finish_reason) == (7, "length")


def test_one_target_forward_per_step_and_one_draft_forward_per_level():
    counted = engine("model", BlockVerifier(), FixedLength(num_speculative_tokens=3), max_slots=3)
    target, draft = counted.parts.target, counted.parts.drafter.lm
    for i in range(3):
        counted.add([5 + i] * (4 + i), max_new_tokens=30, sampling=Sampling(temperature=0.0, seed=0), id=str(i))
    counted.step()
    before = target.num_forwards, draft.num_forwards
    for _ in range(3):
        counted.step()
    assert (target.num_forwards - before[0], draft.num_forwards - before[1]) == (3, 9)
    assert target.bytes_moved == 0


def test_outputs_of_one_prompt_differ_and_the_first_is_the_single_one():
    several = engine("model", BlockVerifier(), FixedLength(num_speculative_tokens=3))
    setting = Sampling(temperature=1.0, seed=4)
    single = several.generate([[3, 4, 5]], max_new_tokens=20, sampling=setting)[0].tokens
    four = [output.tokens for output in several.generate([[3, 4, 5]], max_new_tokens=20, sampling=setting, n=4)]
    assert four[0] == single
    assert len({tuple(tokens) for tokens in four}) == 4


def test_logprobs_are_those_of_the_raw_logits():
    honest = engine("model", BlockVerifier(), FixedLength(num_speculative_tokens=3))
    prompt = [3, 9, 4, 30]
    [output] = honest.generate(
        [prompt], max_new_tokens=12, sampling=Sampling(temperature=0.6, top_k=9, seed=2), logprobs=0
    )
    ids = torch.tensor([[*prompt, *output.tokens]])
    with torch.no_grad():
        rows = tiny("llama")(ids).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
    expected = rows.gather(1, ids[0, len(prompt) :, None]).squeeze(1)
    assert output.logprobs == pytest.approx(expected.tolist(), abs=1e-5)
