"""Chains drawn in one go are those of the growth loop, bit for bit, in fewer calls, and nothing is read in between."""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.core.dice import PhiloxDice
from outrider.core.types import Draft, Request, Running, Sampling, ShortList
from outrider.drafters.model import ModelDrafter
from outrider.drafters.protocol import Drafter, Observed
from outrider.engine.engine import Engine
from outrider.lengths.fixed import FixedLength
from outrider.lengths.heuristic import HeuristicLength
from outrider.lm.model import LanguageModel
from outrider.lm.open import as_lm
from outrider.lm.tabular import TabularLM, random_rows
from outrider.lm.target_info import TargetInfo
from outrider.lm.translated import Translated
from outrider.proof.enumerate import law
from outrider.trees.chain import ChainTree
from outrider.trees.chained import is_chained
from outrider.trees.drawing import drafters_sampling
from outrider.trees.grow import by_level, grow
from outrider.verifiers.token import TokenVerifier
from tests.lm.test_translated import WORDS
from tests.world.heads import toy
from tests.world.models import engine, target
from tests.world.package import PACKAGE
from tests.world.recurrent_zoo import tiny_recurrent
from tests.world.tables import tables
from tests.world.zoo import VOCAB, tiny

CPU = torch.device("cpu")
SETTINGS = {
    "greedy": Sampling(temperature=0.0),
    "drawn": Sampling(temperature=0.8),
    "top-k": Sampling(temperature=1.2, top_k=7),
    "top-p": Sampling(temperature=1.0, top_p=0.7),
    "min-p": Sampling(min_p=0.1),
    "bias": Sampling(logit_bias={5: 2.0, 9: -3.0}),
}
ROOMS = [[4], [4, 4, 4], [0, 3, 5, 0, 1], [2, 5, 1, 4], [5, 0]]


@dataclass(frozen=True, kw_only=True)
class AskedLength(FixedLength):
    """The same lengths, without saying that they are known beforehand."""

    known_ahead: ClassVar[bool] = False


def states_of(drafter: Drafter, samplings: Sequence[Sampling], width: int = VOCAB) -> list[Running]:
    """Requests with prompts of different lengths."""
    random, found = np.random.default_rng(1), []
    for i, sampling in enumerate(samplings):
        prompt = tuple(random.integers(0, width, size=2 + 5 * i).tolist())
        request = Request(id=str(i), prompt=prompt, max_new_tokens=99, sampling=sampling)
        state = Running(request=request, tokens=list(prompt), slot=i, drafter=drafter)
        state.drafter_state = drafter.open(request)
        found.append(state)
    return found


def drafts(
    grower: Callable[..., Draft],
    drafter: Drafter,
    samplings: Sequence[Sampling],
    rooms: Sequence[int],
    *,
    width: int = VOCAB,
    taps: dict[int, torch.Tensor] | None = None,
) -> list[Draft]:
    """The drafts of three steps, in which each request keeps some of its tokens."""
    states, made = states_of(drafter, samplings, width), []
    for step in range(3):
        if taps is not None and step == 0:
            show(drafter, states, [s.tokens[:-1] for s in states], taps)
        dice = PhiloxDice(seeds=[7 + i for i in range(len(states))], steps=[step] * len(states))
        draft = grower(drafter, states, list(rooms), dice)
        made.append(draft)
        tokens, paths = draft.tokens.tolist(), []
        for i, first in enumerate(draft.offsets[:-1].tolist()):
            kept = (step + i) % (draft.num_draft_tokens(i) + 1)
            paths.append(list(range(1, kept + 1)))
            states[i].tokens += [*tokens[first + 1 : first + 1 + kept], (3 + step + i) % width]
            states[i].num_steps += 1
        drafter.commit(states, paths)
        if taps is not None:
            news = [s.tokens[-len(path) - 2 : -1] for s, path in zip(states, paths, strict=True)]
            show(drafter, states, news, taps)
    for state in states:
        drafter.close(state.drafter_state)
    return made


def show(drafter: Drafter, states: Sequence[Running], news: Sequence[Sequence[int]], taps: dict) -> None:
    """Let a head observe positions; what it sees there depends on the token alone."""
    tokens = np.array([token for new in news for token in new], dtype=np.int64)
    seen = {k: table[torch.from_numpy(tokens)] for k, table in taps.items()}
    drafter.observe(states, Observed(tokens=tokens, offsets=np.cumsum([0, *map(len, news)]), taps=seen))


def in_one_go(drafter: Drafter, states: Sequence[Running], rooms: list[int], dice: PhiloxDice) -> Draft:
    length = FixedLength(num_speculative_tokens=5)
    assert is_chained(drafter, ChainTree(), length, states)
    return grow(drafter, ChainTree(), length, states, rooms, dice, CPU)


def level_by_level(drafter: Drafter, states: Sequence[Running], rooms: list[int], dice: PhiloxDice) -> Draft:
    samplings = [drafters_sampling(state.request.sampling, "chain") for state in states]
    length = AskedLength(num_speculative_tokens=5)
    assert not is_chained(drafter, ChainTree(), length, states)
    return by_level(drafter, ChainTree(), length, states, np.array(rooms), samplings, dice, CPU)


def chosen(draft: Draft) -> Draft:
    """A draft that was drawn from point masses, as one that was chosen."""
    drawn = np.flatnonzero(draft.row_of >= 0)
    following = draft.tokens[torch.from_numpy(draft.links[draft.first_child[drawn]])]
    places = following if draft.short_list is None else draft.short_list.places[following]
    rows = draft.rows[torch.from_numpy(draft.row_of[drawn])]
    assert torch.equal(rows, torch.nn.functional.one_hot(places, rows.shape[1]).to(rows))
    return replace(draft, rows=None, row_of=np.full_like(draft.row_of, -1), short_list=None)


def assert_same(one: Sequence[Draft], other: Sequence[Draft]) -> None:
    """Point masses of chains in one go have no rows."""
    for left, drawn in zip(one, other, strict=True):
        right = chosen(drawn) if left.rows is None and drawn.rows is not None else drawn
        for name in [field.name for field in fields(Draft)]:
            mine, theirs = getattr(left, name), getattr(right, name)
            if isinstance(mine, torch.Tensor):
                assert mine.dtype == theirs.dtype, name
                assert torch.equal(mine, theirs), name
            elif isinstance(mine, np.ndarray):
                assert mine.dtype == theirs.dtype, name
                assert np.array_equal(mine, theirs), (name, mine, theirs)
            else:
                assert mine is theirs or mine == theirs, name


def draft_model(dtype: torch.dtype = torch.float32, name: str = "llama", **options: object) -> ModelDrafter:
    return ModelDrafter(lm=LanguageModel(tiny(name).to(dtype), max_slots=8, **options))


@pytest.mark.parametrize("rooms", ROOMS, ids=str)
@pytest.mark.parametrize("name", SETTINGS)
def test_drafts_are_those_of_the_growth_loop_bit_for_bit(name, rooms):
    samplings = [SETTINGS[name]] * len(rooms)
    assert_same(
        drafts(in_one_go, draft_model(), samplings, rooms), drafts(level_by_level, draft_model(), samplings, rooms)
    )


@pytest.mark.parametrize("few", [False, True], ids=["whole", "short list"])
def test_greedy_chains_make_no_rows(few, monkeypatch):
    monkeypatch.setattr("outrider.core.sampling._one_hot", lambda scores: pytest.fail("a row was made"))
    drafter = draft_model()
    if few:
        listed = ShortList.of(torch.arange(0, VOCAB, 3), VOCAB)
        begin, follow = ModelDrafter.begin, ModelDrafter.chain
        monkeypatch.setattr(
            ModelDrafter,
            "begin",
            lambda *given: replace(g := begin(*given), logits=g.logits[..., listed.ids], short_list=listed),
        )

        def narrow(*given):
            step = follow(*given)
            return lambda tokens: step(tokens)[..., listed.ids]

        monkeypatch.setattr(ModelDrafter, "chain", narrow)
    made = drafts(in_one_go, drafter, [SETTINGS["greedy"]] * 3, [4, 2, 0])
    for draft in made:
        assert draft.rows is None
        assert (draft.row_of == -1).all()
        assert not few or set(draft.tokens[draft.depths > 0].tolist()) <= set(listed.ids.tolist())


@pytest.mark.parametrize("seed", range(4))
def test_requests_of_a_batch_may_have_settings_and_lengths_of_their_own(seed):
    random = np.random.default_rng(seed)
    samplings = [SETTINGS[name] for name in random.choice(list(SETTINGS), size=6)]
    rooms = random.integers(0, 6, size=6).tolist()
    rooms[0] = 5
    assert_same(
        drafts(in_one_go, draft_model(), samplings, rooms), drafts(level_by_level, draft_model(), samplings, rooms)
    )


LMS: dict[str, Callable[[], object]] = {
    "half": lambda: LanguageModel(tiny("llama").to(torch.bfloat16), max_slots=8),
    "padded": lambda: LanguageModel(tiny("llama").float(), max_slots=8, pad_to=2),
    "window": lambda: LanguageModel(tiny("mistral").float(), max_slots=8),
    "mixed": lambda: LanguageModel(tiny("gemma2").float(), max_slots=8),
    "slopes": lambda: LanguageModel(tiny("bloom").float(), max_slots=8),
    "narrow": lambda: LanguageModel(tiny("llama").float(), max_slots=8, vocab_size=VOCAB - 7),
    "recurrent": lambda: as_lm(tiny_recurrent("mamba2").float(), max_slots=8),
    "table": lambda: TabularLM(random_rows(VOCAB, 3), VOCAB),
}


@pytest.mark.parametrize("name", LMS)
def test_any_language_model_drafts_the_same_in_one_go(name):
    rooms, samplings = [2, 5, 1, 4], [SETTINGS["drawn"], SETTINGS["greedy"]] * 2
    drafter = ModelDrafter(lm=LMS[name](), vocab_size=VOCAB)
    assert_same(drafts(in_one_go, drafter, samplings, rooms), drafts(level_by_level, drafter, samplings, rooms))


def test_a_draft_model_with_another_vocabulary_drafts_the_same_in_one_go():
    rooms, samplings = [3, 5, 0], [SETTINGS["drawn"]] * 3
    one, other = (ModelDrafter(lm=Translated(TabularLM(random_rows(5, 4), 5), WORDS)) for _ in range(2))
    assert_same(
        drafts(in_one_go, one, samplings, rooms, width=4), drafts(level_by_level, other, samplings, rooms, width=4)
    )


def test_greedy_chains_draw_no_random_numbers(monkeypatch):
    drafter = ModelDrafter(lm=TabularLM(random_rows(VOCAB, 3), VOCAB))
    kept = drafts(in_one_go, drafter, [SETTINGS["greedy"]] * 3, [4, 2, 3])
    monkeypatch.setattr(PhiloxDice, "picks", lambda *_: pytest.fail("random numbers were made"))
    assert_same(drafts(in_one_go, drafter, [SETTINGS["greedy"]] * 3, [4, 2, 3]), kept)
    with pytest.raises(pytest.fail.Exception, match="random numbers were made"):
        drafts(in_one_go, drafter, [SETTINGS["greedy"], SETTINGS["drawn"]], [4, 2])


MIXES = {
    "mixed": [SETTINGS["drawn"], SETTINGS["greedy"]],
    "greedy": [SETTINGS["greedy"], SETTINGS["greedy"]],
    # Over a short list a bias needs rows, which the others then have too, at every level.
    "greedy, some with a bias": [SETTINGS["greedy"], Sampling(temperature=0.0, logit_bias={6: 2.0})],
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("few", [False, True], ids=["whole", "short list"])
@pytest.mark.parametrize("kind", ["own features", "block"])
@pytest.mark.usefixtures("float64_stays_float64")
def test_heads_draft_the_same_in_one_go(kind, few, mix):
    around = TargetInfo.of(target(), None)
    listed = ShortList.of(torch.arange(0, VOCAB, 3), VOCAB)
    made = []
    for grower in (in_one_go, level_by_level):
        head = toy(kind, around, **({"short_list": listed} if few else {}))
        if few:
            whole = head.lm.module.logits
            head.lm.vocab_size = head.lm.module.vocab_size = len(listed.ids)
            head.lm.module.logits = lambda hidden, whole=whole: whole(hidden)[..., listed.ids]
        torch.manual_seed(0)
        taps = {tap: torch.randn(VOCAB, around.hidden_size, dtype=torch.float64) for tap in head.taps}
        rooms = [3, 1, 0, 2] if kind == "block" else [5, 1, 0, 2]
        made.append(drafts(grower, head, MIXES[mix] * 2, rooms, taps=taps))
    assert_same(*made)


@pytest.mark.parametrize(
    "length", [FixedLength(num_speculative_tokens=3), HeuristicLength()], ids=["fixed", "changing"]
)
def test_lengths_that_are_known_ahead_chain_and_penalties_do_not(length):
    drafter = draft_model()
    states = states_of(drafter, [SETTINGS["drawn"], SETTINGS["greedy"]])
    assert is_chained(drafter, ChainTree(), length, states)
    penalised = states_of(drafter, [SETTINGS["drawn"], Sampling(repetition_penalty=1.2)])
    assert not is_chained(drafter, ChainTree(), length, penalised)


@pytest.mark.parametrize("rooms", [[4], [5, 2, 5], [1, 1]], ids=str)
def test_a_chain_costs_one_forward_per_token_of_the_longest(rooms):
    drafter = draft_model()
    drafts(in_one_go, drafter, [SETTINGS["drawn"]] * len(rooms), rooms)
    assert drafter.lm.num_forwards == 3 * max(rooms)


@pytest.mark.parametrize("name", ["greedy", "drawn", "top-k", "min-p", "bias"])
def test_nothing_is_read_from_the_device_within_a_chain(name):
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    # What lies on the meta device has no values, so reading one raises.
    meta = LanguageModel(LlamaForCausalLM(config).to("meta", torch.bfloat16), max_slots=4, max_context=64)
    drafter = ModelDrafter(lm=meta)
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.zeros(1, device="meta").tolist()
    states = states_of(drafter, [SETTINGS[name]] * 3)
    dice = PhiloxDice(seeds=[1, 2, 3], steps=[0, 0, 0])
    length = FixedLength(num_speculative_tokens=5)
    draft = grow(drafter, ChainTree(), length, states, [5, 2, 4], dice, torch.device("meta"))
    assert draft.tokens.shape == (3 + 5 + 2 + 4,)
    assert meta.num_forwards == 5


def calls(work: Callable[[], object]) -> Counter[str]:
    """How often each file's own functions of the package are called."""
    found: Counter[str] = Counter()

    def note(frame: object, event: str, value: object) -> None:
        if event == "call" and (file := frame.f_code.co_filename).startswith(PACKAGE):
            found[file.removeprefix(PACKAGE)] += 1

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


def calls_of_a_draft(num_requests: int, length: int) -> int:
    """Calls of the package's functions in one draft, forwards included, after one to get warm."""
    drafter, counted = draft_model(), []
    for _ in range(2):
        states = states_of(drafter, [SETTINGS["drawn"]] * num_requests)
        dice = PhiloxDice(seeds=list(range(num_requests)), steps=[0] * num_requests)
        counted.append(calls(lambda s=states, d=dice: in_one_go(drafter, s, [length] * num_requests, d)))
        for state in states:
            drafter.close(state.drafter_state)
    print(counted[1])
    return counted[1].total()


def test_a_further_token_costs_few_calls_however_many_requests_there_are():
    alone, together = ((calls_of_a_draft(n, 5) - calls_of_a_draft(n, 2)) / 3 for n in (1, 4))
    # About half of them are three layers that write their keys and values.
    assert alone <= 45
    assert together <= alone + 4


def served(length: FixedLength) -> tuple[list[list[int]], list[int], int]:
    """Tokens of requests that come and go, of one that is cancelled, and how many tokens of a cache were reused."""
    parts = replace(engine().parts, length=length)
    busy, found = Engine(parts, max_slots=3), {}
    waiting = [[5, 9, 4], [7] * 12, [3, 30, 8, 8], [11], [5, 9, 4, 20]]
    settings = [SETTINGS["drawn"], SETTINGS["greedy"], SETTINGS["top-p"], SETTINGS["drawn"], SETTINGS["bias"]]

    def add(prompt: Sequence[int], most: int) -> None:
        number = len(asked)
        sampling = replace(settings[number % len(settings)], seed=number)
        asked.append(busy.add(list(prompt), max_new_tokens=most, sampling=sampling, id=str(number)))

    asked: list[str] = []
    cancelled: list[int] = []
    for step in range(100):
        if waiting and step % 2 == 0:
            add(waiting.pop(0), 17 + 5 * step)
        if step == 5:
            cancelled = busy.cancel("1").tokens
        for update in busy.step():
            if update.output is not None:
                found[update.id] = update.output.tokens
        if not busy.busy and not waiting:
            break
    add([5, 9, 4, *found["0"], 6], 20)
    while busy.busy:
        found |= {update.id: update.output.tokens for update in busy.step() if update.output is not None}
    return [found[id] for id in asked if id != "1"], cancelled, busy.num_reused_tokens


def test_requests_that_come_go_and_reuse_prefixes_get_the_tokens_of_the_growth_loop():
    one, other = served(FixedLength(num_speculative_tokens=4)), served(AskedLength(num_speculative_tokens=4))
    assert one == other
    assert one[1]
    assert one[2] > 0


@pytest.mark.parametrize("name", [*SETTINGS, "flat"])
def test_both_ways_have_one_law_and_the_same_worlds(name):
    sampling = replace(SETTINGS.get(name, Sampling()), logit_bias={1: 0.5} if name == "bias" else {})
    laws = [
        law(tables(3, TokenVerifier(), length, seed=4), [0, 2], 2, sampling=sampling)
        for length in (FixedLength(num_speculative_tokens=2), AskedLength(num_speculative_tokens=2))
    ]
    assert laws[0].emitted == laws[1].emitted
    assert laws[0].accepted == laws[1].accepted
    assert laws[0].error < 1e-12


@dataclass(frozen=True, kw_only=True)
class DrawsFromAnotherRow(ChainTree):
    """Draws the tokens of chains in one go, and only these, from rows in which two tokens are swapped."""

    def picks(self, limits, dice, device):
        return [lambda weights, pick=pick: pick(weights.roll(1, -1)) for pick in super().picks(limits, dice, device)]


def test_enumeration_walks_chains_in_one_go_and_catches_one_that_draws_from_another_row():
    assert law(tables(3, TokenVerifier(), 2, tree=DrawsFromAnotherRow()), [0], 1).error > 1e-3
    asked = tables(3, TokenVerifier(), AskedLength(num_speculative_tokens=2), tree=DrawsFromAnotherRow())
    assert law(asked, [0], 1).error < 1e-12
