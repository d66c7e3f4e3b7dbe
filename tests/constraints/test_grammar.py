"""Grammars on real models: outputs always fit, are those of constrained plain decoding, and end where they should."""

import copy
import gc
import json
import re
import subprocess
import sys
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance.hf import from_tokenizer
from transformers import AddedToken, PreTrainedTokenizerFast

import outrider
from outrider import InputError, Sampling
from outrider.constraints import grammar
from outrider.constraints.automaton import GrammarConstraint, GrammarState
from outrider.constraints.by_llguidance import LLGuidanceMatcher
from outrider.constraints.grammar import any_json, choice, ebnf, json_schema, lark, regex, rules, structural_tag
from outrider.core.sampling import masked, pack, unpacked
from outrider.core.types import Request
from outrider.engine.engine import Engine
from outrider.lm.model import LanguageModel
from tests.world import models
from tests.world.automaton import After
from tests.world.tokenizers import byte_level
from tests.world.zoo import VOCAB

llguidance = pytest.importorskip("llguidance")

PROMPT = "Once upon a time"
GREEDY = Sampling(temperature=0, seed=0)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["cat", "dog"]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "good": {"type": "boolean"},
    },
    "required": ["name", "kind", "ages", "good"],
}
SENTENCE = r"[A-Z][a-z]{2,6}( (cat|dog|tree)){1,4}\."


@pytest.fixture(scope="module")
def pair() -> Engine:
    return outrider.load(dtype="float32")


@pytest.fixture(scope="module")
def trees() -> Engine:
    return outrider.load(tree="gumbel:branching=3x2x1", dtype="float32")


def person(text: str) -> None:
    said = json.loads(text)
    assert set(said) == set(PERSON["properties"])
    assert len(said["name"]) <= 6
    assert said["kind"] in ("cat", "dog")
    assert len(said["ages"]) <= 3
    assert all(isinstance(age, int) and 0 <= age <= 99 for age in said["ages"])
    assert isinstance(said["good"], bool)


def sentence(text: str) -> None:
    assert re.fullmatch(SENTENCE, text), text


def numbers(text: str) -> None:
    assert re.fullmatch(r"(one|two|three)(, (one|two|three)){0,3}!", text), text


def few_words(text: str) -> None:
    assert re.fullmatch("[a-z ]+!", text), text


RULES = [
    pytest.param(json_schema(PERSON, max_whitespace=1), person, id="schema"),
    pytest.param(json_schema(json.dumps(PERSON), max_whitespace=0), person, id="compact-schema"),
    pytest.param(regex(SENTENCE), sentence, id="regex"),
    pytest.param(
        ebnf('root ::= number (", " number){0,3} "!"\nnumber ::= "one" | "two" | "three"'), numbers, id="ebnf"
    ),
    pytest.param(lark('start: words "!"\nwords[max_tokens=3]: /[a-z ]+/'), few_words, id="max-tokens"),
]


@pytest.mark.parametrize(("rule", "check"), RULES)
@pytest.mark.parametrize("which", ["pair", "trees"])
def test_what_ends_fits_the_grammar_at_temperature_0_and_1(which, rule, check, request):
    engine: Engine = request.getfixturevalue(which)
    sampling = [GREEDY, *(Sampling(temperature=1, seed=seed) for seed in range(2))]
    outputs = engine.generate([PROMPT] * 3, max_new_tokens=70, sampling=sampling, constraint=rule)
    ended = [out for out in outputs if out.finish_reason == "stop"]
    assert len(ended) >= 2
    for out in ended:
        check(out.text)
        assert out.tokens[-1] in engine.eos_ids
    assert sum(out.num_accepted_tokens for out in outputs) > 0


@pytest.mark.parametrize(("rule", "check"), RULES[1:3])
@pytest.mark.parametrize("which", ["pair", "trees"])
def test_greedy_output_is_that_of_constrained_plain_decoding(which, rule, check, request):
    engine: Engine = request.getfixturevalue(which)
    plain = engine.plain()
    outputs = [e.generate([PROMPT], max_new_tokens=40, sampling=GREEDY, constraint=rule) for e in (engine, plain)]
    plain.rest()
    assert [out.tokens for out in outputs[0]] == [out.tokens for out in outputs[1]]


def test_greedy_output_is_what_masking_the_models_own_logits_gives(pair):
    """An oracle without the engine: transformers' forward, llguidance's matcher, argmax."""
    rule, model = regex(SENTENCE), pair.parts.target.model
    [out] = pair.generate([PROMPT], max_new_tokens=40, sampling=GREEDY, constraint=rule)
    tokens = pair.encode(PROMPT)
    reader = from_tokenizer(pair.tokenizer, n_vocab=8192, eos_token=sorted(pair.eos_ids))
    matcher = llguidance.LLMatcher(reader, f'%llguidance {{"no_forcing": true}}\nstart: /{SENTENCE}/')
    start = len(tokens)
    while not matcher.is_stopped():
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, -1, :8192].float()
        allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:8192]
        logits[torch.from_numpy(allowed) == 0] = -torch.inf
        tokens.append(int(logits.argmax()))
        assert matcher.consume_token(tokens[-1])
    assert out.tokens[: len(tokens) - start] == tokens[start:]
    assert set(out.tokens[len(tokens) - start :]) <= pair.eos_ids


class RootOnly:
    """A constraint that forgets the grammar behind the first token of a draft."""

    def __init__(self, inner: GrammarConstraint) -> None:
        self.open, self.commit, self.inner = inner.open, inner.commit, inner

    def masks(self, state: object, tokens: list[int], parents: list[int]) -> torch.Tensor:
        found = self.inner.masks(state, tokens, parents).clone()
        found[1:] = -1
        return found


@pytest.mark.parametrize("which", ["pair", "trees"])
@pytest.mark.parametrize("rule", [RULES[1].values[0], RULES[3].values[0]], ids=["schema", "ebnf"])
def test_masks_of_the_root_alone_are_noticed(which, rule, request):
    """Were the tests blind to the masks of deeper nodes, this mutant would pass them."""
    engine: Engine = request.getfixturevalue(which)
    mutant = RootOnly(rule.bind(engine.tokenizer, 8192, engine.eos_ids))
    sampling = [Sampling(temperature=1, seed=seed) for seed in range(3)]
    with pytest.raises(RuntimeError, match="was emitted against the"):
        engine.generate([PROMPT] * 3, max_new_tokens=40, sampling=sampling, constraint=mutant)
    engine.rest()


@pytest.mark.parametrize("drafter", ["suffix", "ngram", "none"])
def test_proposals_of_drafters_without_rows_are_held_to_the_grammar(drafter):
    engine = outrider.load(drafter=drafter)
    prompt = "red, blue, red, blue, red,"
    rule = ebnf('root ::= (" red," | " blue,"){3,9} " green"')
    seeds = [Sampling(temperature=t, seed=3) for t in (0, 1)]
    for out in engine.generate([prompt] * 2, max_new_tokens=80, sampling=seeds, constraint=rule):
        assert re.fullmatch(r"( red,| blue,){3,9} green", out.text), out.text
        assert out.finish_reason == "stop"


def test_any_json_parses_and_ends_only_where_it_is_whole(pair):
    """The end is made likelier than anything else, and still comes only where what was said is JSON."""
    eager = [Sampling(seed=seed, logit_bias=dict.fromkeys(pair.eos_ids, 30.0)) for seed in range(4)]
    outputs = pair.generate([PROMPT] * 4, max_new_tokens=40, sampling=eager, constraint=any_json(1))
    ended = [out for out in outputs if out.finish_reason == "stop"]
    assert ended
    for out in ended:
        json.loads(out.text)


def test_free_requests_beside_constrained_ones_say_what_they_say_alone():
    # The default length depends on how many requests run.
    pair = outrider.load(dtype="float32", length="fixed:4")
    sampling = [Sampling(temperature=1, seed=seed) for seed in range(3)]
    prompts, rules = [PROMPT, "The dog", "A cat"], [None, regex(SENTENCE), json_schema(PERSON, 1)]
    mixed = pair.generate(prompts, max_new_tokens=16, sampling=sampling, constraint=rules)
    free = pair.generate(prompts[:2], max_new_tokens=16, sampling=sampling[:2])
    [alone] = pair.generate(prompts[2:], max_new_tokens=16, sampling=sampling[2:], constraint=rules[2])
    assert mixed[0].tokens == free[0].tokens
    assert mixed[1].tokens != free[1].tokens
    assert mixed[2].tokens == alone.tokens


def test_one_token_is_left_at_the_end_of_a_grammar_and_it_ends_the_output(pair):
    [out] = pair.generate([PROMPT], max_new_tokens=50, sampling=Sampling(seed=0), constraint=regex("yes"))
    assert (out.text, out.finish_reason) == ("yes", "stop")
    assert out.tokens[-1] in pair.eos_ids
    # Five tokens were drafted at once; the ending one stands inside the draft.
    assert out.num_steps < len(out.tokens)


def test_every_ending_token_of_the_request_may_end_a_grammar(pair):
    other = pair.encode("!")[0]
    constraint = regex("yes").bind(pair.tokenizer, 8192, frozenset({other}))
    request = Request(
        id="own",
        prompt=tuple(pair.encode(PROMPT)),
        max_new_tokens=20,
        sampling=Sampling(seed=0),
        eos_ids=frozenset({other}),
        constraint=constraint,
    )
    pair.add(request)
    output = None
    while output is None:
        output = next((update.output for update in pair.step()), None)
    assert output.tokens[-1] == other
    assert output.finish_reason == "stop"


@pytest.mark.parametrize("tree", ["dynamic:width=4,num_nodes=20", "opt:num_nodes=12", "lattice:num_nodes=8"])
def test_chosen_trees_hold_nothing_that_the_grammar_forbids(tree, capfd):
    """One token is left of most rows, where the trees want several."""
    engine = outrider.load(tree=tree, dtype="float32", length="fixed:2")
    rule = regex("a")
    [out] = engine.generate([PROMPT], max_new_tokens=20, sampling=GREEDY, constraint=rule)
    assert (out.text, len(out.tokens)) == ("a", 2)
    # The tokens that say "a", and the end behind each of them.
    ways = masked(torch.zeros(1, 8192), _first_row(rule, engine)).eq(0).sum().item()
    assert 0 < out.num_draft_tokens <= 2 * ways
    assert "Warning" not in capfd.readouterr().err


def _first_row(rule: grammar.Grammar, engine: Engine) -> torch.Tensor:
    constraint = rule.bind(engine.tokenizer, 8192, engine.eos_ids)
    return constraint.masks(constraint.open(), [0], [-1])


def test_a_draft_that_strays_to_a_dead_end_ends_nothing():
    """After "a" nothing can come. Plain decoding never says it here, and the draft model of another text does."""
    engine = outrider.load(drafter="ngram:prompt_lookup_min=1", length="fixed:5", dtype="float32")
    a, c, x = (engine.encode(letter)[0] for letter in "acx")
    rule = lark('start: "a" B | "c"\nB: /b/ & /c/')
    biased = [Sampling(temperature=0, logit_bias={token: 50.0}) for token in (c, a)]
    [out] = engine.generate([[x, a, x, a, x]], max_new_tokens=5, sampling=biased[0], constraint=rule)
    assert (out.text, out.finish_reason, out.num_draft_tokens > 0) == ("c", "stop", True)
    for way in (engine, engine.plain()):
        with pytest.raises(InputError, match="no token of the vocabulary goes on with the Lark"):
            way.generate([[x, a, x, a, x]], max_new_tokens=5, sampling=biased[1], constraint=rule)
        assert not way.busy


def test_stop_strings_end_a_constrained_output_as_a_free_one(pair):
    [out] = pair.generate([PROMPT], max_new_tokens=50, sampling=GREEDY, constraint=regex("aaa(bbb)+"), stop=["bb"])
    assert out.text == "aaa"
    assert out.finish_reason == "stop"


def test_special_tokens_are_no_text(pair):
    constraint = regex(".*").bind(pair.tokenizer, 8192, pair.eos_ids)
    row = masked(torch.zeros(1, 8192), constraint.masks(constraint.open(), [0], [-1]))[0]
    special = set(pair.tokenizer.all_special_ids)
    assert [i for i in special if row[i] == 0] == sorted(pair.eos_ids)
    assert special - pair.eos_ids


SPELT = "<|call|>"
"""An added token of the tokenizers below, as text."""


def spelling(special: bool) -> PreTrainedTokenizerFast:
    tokenizer = byte_level(300)
    tokenizer.add_tokens([AddedToken(SPELT, special=special, normalized=False)])
    return tokenizer


def shipped() -> PreTrainedTokenizerFast:
    return outrider.load(drafter="none").tokenizer


def forced(mark: str) -> list[tuple[grammar.Grammar, list[str]]]:
    """Grammars, each with all of its texts."""
    named = {"type": "object", "properties": {mark: {"const": 1}}, "required": [mark], "additionalProperties": False}
    return [
        (regex(f"A {re.escape(mark)} hi"), [f"A {mark} hi"]),
        (choice([f"the {mark}b", f"the {mark} sea", "they"]), [f"the {mark}b", f"the {mark} sea", "they"]),
        (json_schema({"const": f"x{mark}y"}), [json.dumps(f"x{mark}y")]),
        (json_schema({"enum": [f"{mark}y", "cat"]}), [json.dumps(f"{mark}y"), '"cat"']),
        (json_schema(named, 0), [json.dumps({mark: 1})]),
        (lark(f'start: "a{mark}b"'), [f"a{mark}b"]),
        (lark(f'%llguidance {{"no_forcing": false}}\nstart: "a{mark}b"'), [f"a{mark}b"]),
    ]


@pytest.mark.parametrize(
    ("make", "mark"),
    [
        pytest.param(lambda: spelling(True), SPELT, id="special"),
        pytest.param(lambda: spelling(False), SPELT, id="added"),
        pytest.param(shipped, "<|user|>", id="shipped"),
    ],
)
def test_every_ordinary_token_that_goes_on_with_a_text_may_come_and_no_other(make, mark):
    """Of a finite grammar the allowed tokens are known without any library: those with which one of the texts goes on,
    however the tokenizer would split it and whatever added token the text spells.
    """
    tokenizer = make()
    width, end = len(tokenizer), tokenizer.eos_token_id
    words = {i: tokenizer.decode([i]) for i in set(range(width)) - set(tokenizer.added_tokens_decoder)}
    for rule, texts in forced(mark):
        constraint = rule.bind(tokenizer, width, frozenset({end}))
        for seed in range(6):
            dice, state, said = np.random.default_rng(seed), constraint.open(), ""
            while True:
                allowed = unpacked(constraint.masks(state, [0], [-1]), width)[0].nonzero()[:, 0].tolist()
                rests = [text[len(said) :] for text in texts if text.startswith(said)]
                wanted = {i for i, word in words.items() if any(rest.startswith(word) for rest in rests)}
                assert set(allowed) == wanted | ({end} if "" in rests else set()), (rule.text, said)
                token = int(dice.choice(allowed))
                constraint.commit(state, [token])
                if token == end:
                    break
                said += words[token]


def test_a_branch_of_a_draft_changes_no_mask_of_another(pair):
    """Rolling the matcher of llguidance 1.9.1 back from one branch gave its mask to the other."""
    schema = {
        "type": "object",
        "properties": {"n": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "v": {"type": "string", "maxLength": 12}},
    }
    constraint = json_schema(schema, 0).bind(pair.tokenizer, 8192, pair.eos_ids)
    begun, one, other = ([94, 5, 81, 5, 29, 1864, 5], [89, 2978], [81, 5, 29])
    assert [pair.tokenizer.decode(each) for each in (begun, one, other)] == ['{"n": {"', 'v":', 'n":']
    state, fresh = constraint.open(), constraint.open()
    constraint.commit(state, begun)
    constraint.masks(state, [0, *one], [-1, 0, 1])
    after = constraint.masks(state, [0, *other], [-1, 0, 1, 2])[-1]
    constraint.commit(fresh, [*begun, *other])
    assert torch.equal(after, constraint.masks(fresh, [0], [-1])[0])


def test_outputs_may_spell_special_tokens(pair):
    outputs = pair.generate(
        [PROMPT] * 2, max_new_tokens=40, sampling=GREEDY, constraint=[rule for rule, _ in forced("<|user|>")[:2]]
    )
    assert [out.finish_reason for out in outputs] == ["stop"] * 2
    assert outputs[0].text == "A <|user|> hi"


@pytest.mark.parametrize("which", ["pair", "trees"])
def test_min_tokens_and_a_grammar_that_must_end_earlier_are_both_named(which, request):
    engine: Engine = request.getfixturevalue(which)
    with pytest.raises(InputError, match=r"^min_tokens=9 and the constraint .* must end before"):
        engine.generate([PROMPT], max_new_tokens=12, min_tokens=9, sampling=GREEDY, constraint=regex("yes|no"))
    assert not engine.busy


def test_a_library_that_refuses_what_it_allows_ends_the_request_with_one_sentence(monkeypatch):
    engine = outrider.load(drafter="none")
    monkeypatch.setattr(LLGuidanceMatcher, "accept", lambda self, token: False)
    with pytest.raises(InputError, match=r"^llguidance allows token \d+ in the regex no and does not accept it"):
        engine.generate([PROMPT], max_new_tokens=4, constraint=regex("no"))
    assert not engine.busy


def test_a_vocabulary_padded_beyond_the_tokenizer_is_never_drawn_from():
    """Logits are wider than the tokenizer knows; the padding is as likely as anything else."""
    lm = models.target()
    own = outrider.load(drafter="none")
    engine = Engine(
        replace(own.parts, target=LanguageModel(_wide(own), max_slots=2)), tokenizer=own.tokenizer, eos_ids=own.eos_ids
    )
    assert engine.parts.target.vocab_size == 8192 + 40
    assert lm.vocab_size < 8192
    for seed in range(3):
        [out] = engine.generate([PROMPT], max_new_tokens=40, sampling=Sampling(seed=seed), constraint=regex("[a-c]{5}"))
        assert re.fullmatch("[a-c]{5}", out.text)
        assert max(out.tokens) < 8192


def _wide(engine: Engine) -> torch.nn.Module:
    model = copy.deepcopy(engine.parts.target.model)
    model.resize_token_embeddings(8192 + 40, mean_resizing=False)
    return model


def test_compiled_grammars_are_kept(pair):
    for rule in (regex, lambda text: ebnf(f'root ::= "{text}"')):
        kept = rule("kept").bind(pair.tokenizer, 8192, pair.eos_ids)
        assert rule("kept").bind(pair.tokenizer, 8192, pair.eos_ids) is kept
        assert rule("kept!").bind(pair.tokenizer, 8192, pair.eos_ids) is not kept
        assert rule("kept").bind(pair.tokenizer, 8192, frozenset({17})) is not kept


def test_cancelling_frees_the_state(pair):
    id = pair.add(PROMPT, sampling=GREEDY, constraint=json_schema(PERSON))
    for _ in range(3):
        pair.step()
    state = weakref.ref(pair._schedule.seats[id].running.constraint_state)
    assert state() is not None
    pair.cancel(id)
    gc.collect()
    assert state() is None


TREES = [
    (json_schema(PERSON, 1), '{"name": "Tim"'),
    (regex(SENTENCE), "Tom cat d"),
    (regex("yes|yesterday"), "yes"),
    (choice(["ab", "abc", "b"]), "ab"),
    (lark('start: "(" start ")" | /[a-c]+/'), "((ab)"),
    (ebnf('root ::= "(" root ")" | [a-c]+'), "((ab)"),
    (lark('start: words "!" words\nwords[max_tokens=2]: /[a-z ]+/'), "a dog!"),
    (lark('start: (words "!")*\nwords[stop="."]: /[a-z .]*/'), "a dog.!"),
]


@pytest.mark.parametrize(("rule", "text"), TREES)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_masks_of_a_tree_are_those_of_each_path_alone(pair, rule, text, data):
    """The depth-first walk, with what it remembers, against a fresh automaton per node."""
    constraint = rule.bind(pair.tokenizer, 8192, pair.eos_ids)
    state = constraint.open()
    parents = [-1] + [data.draw(st.integers(0, i)) for i in range(data.draw(st.integers(0, 7)))]
    begun = pair.encode(text)[: data.draw(st.integers(0, 6))]
    constraint.commit(state, begun)
    dice = np.random.default_rng(data.draw(st.integers(0, 99)))
    tokens, paths = [0], [[]]
    for parent in parents[1:]:
        row = unpacked(constraint.masks(state, tokens, parents[: len(tokens)])[parent][None], 8192)[0]
        legal = torch.nonzero(row).flatten().tolist()
        tokens.append(int(dice.choice(legal)) if dice.random() < 0.8 else int(dice.integers(8192)))
        paths.append([*paths[parent], tokens[-1]])
    found = constraint.masks(state, tokens, parents)
    for path, row in zip(paths, found, strict=True):
        alone = _walked(constraint, [*begun, *path])
        if alone is None:
            assert (row == -1).all()
        else:
            assert torch.equal(row, constraint.masks(alone, [0], [-1])[0])
    # Nothing of the draft is left behind.
    begin = _walked(constraint, begun)
    assert torch.equal(constraint.masks(state, [0], [-1]), constraint.masks(begin, [0], [-1]))


def _walked(constraint: GrammarConstraint, tokens: list[int]) -> GrammarState | None:
    """A fresh state behind some tokens; None if one of them is not allowed, or ends the output."""
    state = constraint.open()
    for token in tokens:
        if state.matcher.ended or not unpacked(constraint.masks(state, [0], [-1]), 8192)[0, token]:
            return None
        constraint.commit(state, [token])
    return None if state.matcher.ended else state


@given(
    allowed=st.integers(1, 100).flatmap(lambda n: st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=1))
)
def test_packed_masks_say_what_was_packed(allowed):
    flags = torch.tensor(allowed)
    assert torch.equal(masked(torch.zeros(flags.shape), pack(flags)) == 0, flags)


def test_an_automaton_of_ones_own_constrains_the_engine():
    rule = After(
        vocab=VOCAB, followers={t: frozenset({(t + 1) % 8 + 3}) for t in range(3, 11)}, first=frozenset({3, 5})
    )
    for drafter in ("model", "ngram", "none"):
        engine = models.engine(drafter)
        outputs = engine.generate([[4, 5], [6]], max_new_tokens=20, sampling=GREEDY, constraint=rule)
        assert all(rule.fits(out.tokens) for out in outputs)
        plain = engine.plain().generate([[4, 5], [6]], max_new_tokens=20, sampling=GREEDY, constraint=rule)
        assert [out.tokens for out in outputs] == [out.tokens for out in plain]


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        (regex("(ab"), "the regex cannot be compiled: .*"),
        (regex("a$b"), r"the regex cannot be compiled: lookarounds not supported"),
        (json_schema('{"type":'), "the JSON schema cannot be compiled: it is not JSON: Expecting value"),
        (
            json_schema({"type": "array", "uniqueItems": True}),
            r'the JSON schema cannot be compiled: Unimplemented keys: \["uniqueItems"\]',
        ),
        (regex("a{3,1}"), "the regex cannot be compiled: .*"),
        (regex("[a--b]"), "the regex cannot be compiled: .--. in the character class .* has two meanings"),
        (lark("start: x"), "the Lark cannot be compiled: .*x"),
        (json_schema({"type": "nope"}), r"the JSON schema cannot be compiled: [^;]*nope[^;]*$"),
        (ebnf('rot ::= "a"'), "the EBNF cannot be compiled: No .root. rule found"),
        (ebnf('root ::= "a" foo'), "the EBNF cannot be compiled: Rule .foo. not found"),
        (lark("start: B\nB: /b/ & /c/"), "no token of the vocabulary goes on with the Lark"),
        ([], "got 0 constraints for 1 prompts"),
    ],
    ids=lambda value: "" if isinstance(value, str) else getattr(value, "text", "count"),
)
def test_wrong_constraints_get_a_sentence(pair, rule, sentence):
    with pytest.raises(InputError, match=sentence):
        pair.generate([PROMPT], constraint=rule)
    assert not pair.busy


def test_a_schema_that_is_no_json_gets_a_sentence():
    with pytest.raises(InputError, match=r"the schema cannot be written as JSON: .* set "):
        json_schema({"enum": {1, 2}})


def test_a_grammar_without_an_ending_token_is_refused(pair):
    with pytest.raises(InputError, match="a grammar needs an ending token"):
        pair.generate([PROMPT], constraint=regex("a"), ignore_eos=True)


def test_a_grammar_without_a_tokenizer_is_refused():
    with pytest.raises(InputError, match="a grammar needs the target's tokenizer"):
        models.engine().generate([[1]], constraint=regex("a"))


def test_without_llguidance_the_sentence_says_what_to_install(pair, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InputError, match=r"pip install \"outrider\[grammar\] @"):
        # Another ending token, so that no compiled grammar is remembered.
        regex("a").bind(pair.tokenizer, 8192, frozenset({17}))


def test_whitespace_cannot_be_negative():
    with pytest.raises(InputError, match="max_whitespace must be >= 0, got -1"):
        any_json(-1)


def test_rules_are_read_as_what_they_are():
    assert rules('start: "a"').kind == rules("%llguidance {}\nstart[lazy]: /a/").kind == "Lark"
    assert rules('root ::= start\nstart ::= "a"').kind == "EBNF"


def test_importing_outrider_imports_no_library_of_grammars():
    code = "import sys, outrider; print({'llguidance', 'pydantic'} & sys.modules.keys())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "set()"


@pytest.mark.parametrize("texts", ["yes", []])
def test_a_choice_is_a_list_of_texts(texts):
    with pytest.raises(InputError, match="choice takes a list of at least one text"):
        choice(texts)


@pytest.mark.parametrize("which", ["pair", "trees"])
def test_a_choice_is_one_of_its_texts(which, request):
    engine: Engine = request.getfixturevalue(which)
    texts = ['"quoted" \\', "zwei Wörter\n", "a/b", "a"]
    sampling = [Sampling(temperature=2, seed=seed) for seed in range(8)]
    outputs = engine.generate([PROMPT] * 8, max_new_tokens=30, sampling=sampling, constraint=choice(texts))
    assert {out.finish_reason for out in outputs} == {"stop"}
    assert {out.text for out in outputs} <= set(texts)
    assert len({out.text for out in outputs}) > 1


CALLS = {
    "structures": [
        {"begin": "<f=add>", "schema": PERSON, "end": "</f>"},
        {"begin": "<f=no>", "schema": {"type": "boolean"}, "end": "!"},
    ],
    "triggers": ["<f="],
}


def test_behind_a_trigger_comes_a_call_and_nothing_else(pair):
    constraint = structural_tag(CALLS, max_whitespace=0).bind(pair.tokenizer, 8192, pair.eos_ids)
    whole = '{"name": "Tim", "kind": "cat", "ages": [1, 2], "good": true}'

    def takes(text: str) -> bool | None:
        """None: the text cannot come. Otherwise whether the output may end after it."""
        state = constraint.open()
        if not all(state.matcher.accept(token) for token in pair.encode(text)):
            return None
        return bool(unpacked(constraint.masks(state, [0], [-1]), 8192)[0, sorted(pair.eos_ids)].all())

    assert takes("Once < upon <f a time. ")
    assert takes(f"So <f=add>{whole}</f> and <f=no>true! Yes.")
    assert takes(f"So <f=add>{whole}") is False
    assert takes("So <f=ad") is False
    assert takes("So <f=x") is None
    assert takes('So <f=no>"a"') is None
    assert takes("So <f=no>true?") is None


def test_calls_in_outputs_of_the_engine_fit(trees):
    """The trigger is a word that the model says often."""
    call = {"begin": "was ", "schema": {"enum": ["so", 3]}, "end": "!"}
    rule = structural_tag({"structures": [call], "triggers": ["was"]})
    sampling = [Sampling(seed=seed, temperature=0.5) for seed in range(4)]
    outputs = trees.generate([PROMPT] * 4, max_new_tokens=60, sampling=sampling, constraint=rule)
    calls = [call for out in outputs for call in re.findall(r"was(.{6})", out.text, re.DOTALL)]
    assert len(calls) >= 4
    assert all(re.match(r' ("so"!|3!)', call) for call in calls), calls
    assert sum(out.num_accepted_tokens for out in outputs) > 0


def test_a_trigger_that_is_a_special_token_is_that_token(pair):
    tokenizer = copy.deepcopy(pair.tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<call>", "</call>"]})
    start, end = tokenizer.convert_tokens_to_ids(["<call>", "</call>"])
    call = {"begin": "<call>", "schema": {"const": 7}, "end": "</call>"}
    rule = structural_tag({"structures": [call], "triggers": ["<call>"]})
    constraint = rule.bind(tokenizer, len(tokenizer), pair.eos_ids)
    seven = pair.encode("7")
    places = [([], {start}), ([start], {seven[-1]}), ([start, *seven], {end}), ([start, *seven, end], {start})]
    for said, allowed in places:
        state = constraint.open()
        constraint.commit(state, said)
        row = unpacked(constraint.masks(state, [0], [-1]), len(tokenizer))[0]
        assert {token for token in (start, end) if row[token]} == allowed & {start, end}
        assert all(row[token] for token in allowed)


@pytest.mark.parametrize(
    ("tag", "sentence"),
    [
        ("[", "the structural tag is not JSON"),
        ({"format": {}}, "has a list of structures and a list of triggers"),
        ({"structures": [{"begin": "a"}], "triggers": ["a"]}, "has begin, schema and end"),
        ({"structures": [{"begin": "a", "schema": {}, "end": ""}], "triggers": ["b"]}, "'a' must start with one of"),
        ({"structures": [{"begin": "a", "schema": {}, "end": ""}], "triggers": [""]}, "text of at least one character"),
    ],
    ids=str,
)
def test_wrong_structural_tags_get_a_sentence(tag, sentence):
    with pytest.raises(InputError, match=sentence):
        structural_tag(tag)
