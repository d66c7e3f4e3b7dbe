"""Values of the wrong kind are named in one sentence; NumPy's numbers become Python's."""

import pytest

from tests.untyped import outcomes

WRONG = {
    "outrider.Sampling(temperature='1')": "temperature must be a number, got '1'",
    "outrider.Sampling(temperature=None)": "temperature must be a number, got None",
    "outrider.Sampling(temperature=True)": "temperature must be a number, got True",
    "outrider.Sampling(top_k=4.5)": "top_k must be a whole number, got 4.5",
    "outrider.Sampling(top_p=[0.5])": "top_p must be a number, got [0.5]",
    "outrider.Sampling(seed=2**64)": "seed must be <= 2**64 - 1, got 18446744073709551616",
    "outrider.Sampling(seed=1.0)": "seed must be a whole number, got 1.0",
    "outrider.Sampling(seed=np.int64(-1))": "seed must be >= 0, got -1",
    "outrider.Sampling(logit_bias=[3])": "logit_bias must map token ids to numbers, got [3]",
    "outrider.Sampling(logit_bias={'a': 1.0})": "a token of logit_bias must be a whole number, got 'a'",
    "outrider.Sampling(logit_bias={3: 'much'})": "a logit_bias must be a number, got 'much'",
    "outrider.Sampling(processors=len)": "processors must be a list of logits processors, got <built-in function len>",
    "outrider.Sampling(processors=['top_k'])": "processors must be a list of logits processors, got ['top_k']",
    "engine.add('a', max_new_tokens=4.5)": "max_new_tokens must be a whole number, got 4.5",
    "engine.add('a', max_new_tokens='4')": "max_new_tokens must be a whole number, got '4'",
    "engine.add('a', sampling={'temperature': 0})": "sampling must be an outrider.Sampling, got {'temperature': 0}",
    "engine.add('a', min_tokens=1.5)": "min_tokens must be a whole number, got 1.5",
    "engine.add('a', logprobs='all')": "logprobs must be a whole number, got 'all'",
    "engine.add('a', stop_token_ids=['</s>'])": ("a token of stop_token_ids must be a whole number, got '</s>'"),
    "engine.add('a', stop_token_ids=3)": "stop_token_ids must be a list of token ids, got 3",
    "engine.add('a', stop=3)": "stop must be a text or a list of texts, got 3",
    "engine.add('a', stop=[3])": "a stop string must be a text, got 3",
    "engine.encode([{'role': 'user'}])": "a chat message needs content, got {'role': 'user'}",
    "engine.encode([{'role': 'user', 'content': None}])": (
        "a chat message needs content, got {'role': 'user', 'content': None}"
    ),
    "engine.encode([{'content': 'Hello'}])": "a chat message needs a role, such as 'user', got {'content': 'Hello'}",
    "engine.encode(None)": "a prompt is a text, a list of token ids or a list of chat messages, got None",
    "engine.encode(b'Once')": "a prompt is a text, a list of token ids or a list of chat messages, got b'Once'",
    "engine.encode({'role': 'user'})": (
        "a prompt that is a mapping holds messages, or input_ids of a tokenizer; this holds 'role'"
    ),
    "engine.encode([5, 6.0])": (
        "a prompt is a text, a list of token ids or a list of chat messages; this list holds 6.0"
    ),
    "engine.encode(np.array([[5, 6]]))": (
        "a prompt is a text, a list of token ids or a list of chat messages; this list holds [5, 6]"
    ),
    "engine.generate(None)": "prompts must be a list; for one prompt give [prompt]; got None",
    "engine.generate({'role': 'user'})": "prompts must be a list; for one prompt give [prompt]; got {'role': 'user'}",
    "engine.generate([5])": "a prompt is a text, a list of token ids or a list of chat messages, got 5",
    "engine.generate(['a'], n=1.5)": "n must be a whole number, got 1.5",
    "engine.generate(['a'], n='2')": "n must be a whole number, got '2'",
    "engine.generate(['a'], options={'max_new_tokens': 4})": (
        "options must be an outrider.Generation, got {'max_new_tokens': 4}"
    ),
    "engine.add('a', options=outrider.Generation(stop=3))": "stop must be a text or a list of texts, got 3",
    "engine.generate(['a'], sampling={'seed': 1})": "sampling must be an outrider.Sampling, got {'seed': 1}",
    "engine.generate(['a'], sampling=outrider.Sampling(processors=[lambda ids, scores: None]))": (
        "the logits processor <lambda> must return scores of shape (1, 8192), got None"
    ),
    "engine.generate(['a'], sampling=outrider.Sampling(processors=[lambda ids, scores: scores[:, :5]]))": (
        "the logits processor <lambda> must return scores of shape (1, 8192), got shape (1, 5)"
    ),
    "outrider.load(tokenizer=3)": "tokenizer must be a directory, a GGUF file, a hub id or a tokenizer, got 3",
    "outrider.load(max_slots='8')": "max_slots must be a whole number, got '8'",
    "outrider.load(max_context=2.5)": "max_context must be a whole number, got 2.5",
    "outrider.load(allow_lossy='yes')": "allow_lossy must be true or false, got 'yes'",
    "outrider.Setup(max_slots='8')": "max_slots must be a whole number, got '8'",
    "outrider.Request(id='a', prompt=(1, 2.0), max_new_tokens=4, sampling=outrider.Sampling())": (
        "a token of the prompt must be a whole number, got 2.0"
    ),
}

NUMPYS = {
    "engine.encode(np.array([3, 9, 4]))": "[3, 9, 4]",
    "engine.encode([np.int32(3), np.uint8(9)])": "[3, 9]",
    "engine.generate(['Once upon a'], stop=' time', sampling=outrider.Sampling(temperature=0))[0].text": "''",
    "outrider.Setup(max_slots=np.int64(3)).max_slots": "3",
    "outrider.Sampling(temperature=np.float32(0.5)).temperature": "0.5",
    "outrider.Sampling(top_k=np.int64(3)).top_k": "3",
    "outrider.Sampling(seed=np.uint64(2**64 - 1)).seed": "18446744073709551615",
    "outrider.Sampling(logit_bias={np.int32(4): np.float16(1)}).logit_bias": "{4: 1.0}",
    "[(r.prompt, r.max_new_tokens, r.eos_ids) for r in [outrider.Request(id='a', prompt=tuple(np.array([1, 2])), "
    "max_new_tokens=np.int32(4), sampling=outrider.Sampling(), eos_ids=frozenset([np.int64(7)]))]]": (
        "[((1, 2), 4, frozenset({7}))]"
    ),
}


@pytest.fixture(scope="module")
def answers() -> dict[str, str]:
    """What each expression gives in a user's script."""
    return outcomes([*WRONG, *NUMPYS])


@pytest.mark.parametrize("expression", WRONG)
def test_a_value_of_the_wrong_kind_is_named(answers, expression):
    assert answers[expression] == f"InputError: {WRONG[expression]}"


@pytest.mark.parametrize("expression", NUMPYS)
def test_numpys_numbers_become_pythons(answers, expression):
    assert answers[expression] == NUMPYS[expression]
