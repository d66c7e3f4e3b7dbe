"""POST /v1/completions over a real server."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
import torch

import outrider
from outrider import Sampling
from tests.serve.streams import chunks, post

PATH = "/v1/completions"
PROMPT = "Once upon a time"
GREEDY = {"model": "pair", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}


def alone(engine: outrider.Engine, prompt: str, **options: Any) -> Any:
    settings = Sampling(temperature=0)
    [found] = engine.generate([prompt], sampling=settings, **options)
    return found


def test_the_answer_is_that_of_the_engine(client: httpx.Client, engine: outrider.Engine) -> None:
    found = post(client, PATH, GREEDY)
    own = alone(engine, PROMPT, max_new_tokens=12)
    [choice] = found["choices"]
    assert (choice["text"], choice["finish_reason"], choice["index"]) == (own.text, "length", 0)
    assert found["object"] == "text_completion"
    assert found["model"] == "pair"
    assert found["id"].startswith("cmpl-")
    assert found["system_fingerprint"].startswith("fp_")
    used = found["usage"]
    assert (used["prompt_tokens"], used["completion_tokens"], used["total_tokens"]) == (4, 12, 16)
    assert found["metrics"]["speculative_decoding"]["num_spec_tokens"] >= 1


def test_many_mixed_streams_are_each_as_alone(url: str, engine: outrider.Engine) -> None:
    prompts = [f"{name} {verb} a {thing}" for name in ("Mia", "Tom") for verb in ("saw", "ate") for thing in "abcd"]
    wanted = [alone(engine, prompt, max_new_tokens=6 + i).text for i, prompt in enumerate(prompts)]

    def ask(i: int) -> str:
        with httpx.Client(base_url=url, timeout=120) as client:
            body = {"prompt": prompts[i], "max_tokens": 6 + i, "temperature": 0}
            if i % 2:
                return str(post(client, PATH, body)["choices"][0]["text"])
            return "".join(chunk["choices"][0]["text"] for chunk in chunks(client, PATH, body))

    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(ask, range(len(prompts)))) == wanted


def test_a_stream_adds_up_to_the_answer(client: httpx.Client) -> None:
    body = {**GREEDY, "logprobs": 2, "max_tokens": 20}
    # In float32 the bits of a logprob depend on how much of the prompt is computed: both take it over from this one.
    post(client, PATH, body)
    whole = post(client, PATH, body)["choices"][0]
    found = chunks(client, PATH, {**body, "stream_options": {"include_usage": True, "continuous_usage_stats": True}})
    last, parts = found[-1], found[:-1]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 20
    assert last["metrics"]["time_to_first_token_ms"] >= 0
    assert "".join(part["choices"][0]["text"] for part in parts) == whole["text"]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [each for part in parts for each in part["choices"][0]["logprobs"][name]] == whole["logprobs"][name]
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
    counts = [part["usage"]["completion_tokens"] for part in parts]
    assert counts == sorted(counts)
    assert counts[-1] == 20
    assert "system_fingerprint" in parts[-1]
    assert "system_fingerprint" not in parts[0]


def test_without_include_usage_no_chunk_has_usage(client: httpx.Client) -> None:
    found = chunks(client, PATH, GREEDY)
    assert all(chunk["choices"] and not chunk.get("usage") for chunk in found)


def test_stream_interval_joins_tokens(client: httpx.Client) -> None:
    body = {**GREEDY, "max_tokens": 40, "return_token_ids": True, "ignore_eos": True}
    sizes = [len(chunk["choices"][0]["token_ids"]) for chunk in chunks(client, PATH, {**body, "stream_interval": 10})]
    assert sum(sizes) == 40
    assert all(size >= 10 for size in sizes[1:-1])


def test_several_prompts_and_outputs_keep_their_order(client: httpx.Client, engine: outrider.Engine) -> None:
    # Without drafts: the length of a draft depends on how many requests run, and a drawn text on the length.
    prompts = [PROMPT, "The dog"]
    body = {"prompt": prompts, "n": 3, "seed": 7, "max_tokens": 8, "temperature": 1.0, "speculation": False}
    found = post(client, PATH, body)
    own = engine.plain().generate(prompts, n=3, max_new_tokens=8, sampling=Sampling(temperature=1.0, seed=7))
    assert [choice["index"] for choice in found["choices"]] == list(range(6))
    assert [choice["text"] for choice in found["choices"]] == [output.text for output in own]
    assert found["usage"]["prompt_tokens"] == own[0].prompt_tokens + own[3].prompt_tokens
    assert found["metrics"] is None
    texts = [""] * 6
    for chunk in chunks(client, PATH, body):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == [output.text for output in own]


def test_token_ids_are_a_prompt_too(client: httpx.Client, engine: outrider.Engine) -> None:
    ids = engine.tokenizer(PROMPT)["input_ids"]
    text = post(client, PATH, GREEDY)["choices"][0]["text"]
    assert post(client, PATH, {**GREEDY, "prompt": ids})["choices"][0]["text"] == text
    found = post(client, PATH, {**GREEDY, "prompt": [ids, ids], "return_token_ids": True})["choices"]
    assert [choice["text"] for choice in found] == [text, text]
    assert found[1]["prompt_token_ids"] == ids
    assert engine.tokenizer.decode(found[1]["token_ids"]) == text


def test_echo_without_output_is_the_prompt(client: httpx.Client) -> None:
    body = {"prompt": PROMPT, "echo": True, "max_tokens": 0, "logprobs": 1}
    found = post(client, PATH, body)
    [choice] = found["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert found["usage"]["completion_tokens"] == 0
    assert found["usage"]["prompt_tokens"] == 4
    assert len(choice["logprobs"]["tokens"]) == 4
    assert "".join(choice["logprobs"]["tokens"]) == PROMPT
    [chunk] = chunks(client, PATH, body)
    assert chunk["choices"][0]["text"] == PROMPT
    assert chunk["choices"][0]["finish_reason"] == "length"


def plain_logprobs(engine: outrider.Engine, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        logits = engine.parts.target.model(torch.tensor([ids])).logits[0]
    return logits[:, : engine.parts.target.vocab_size].float().log_softmax(-1).numpy()


@pytest.mark.parametrize("as_ids", [True, False])
def test_echoed_logprobs_are_those_of_a_plain_forward(
    client: httpx.Client, engine: outrider.Engine, as_ids: bool
) -> None:
    # What lm-evaluation-harness sends and reads.
    texts = ["Once upon a time there was a dog.", "The cat sat on the mat and slept", "One two three"]
    rows = [engine.tokenizer(text)["input_ids"] for text in texts]
    body = {"prompt": rows if as_ids else texts, "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0}
    found = post(client, PATH, {**body, "seed": 1234, "model": "pair"})
    seen = set[bool]()
    for choice, ids in zip(sorted(found["choices"], key=lambda each: each["index"]), rows, strict=True):
        own, top = choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]
        assert len(own) == len(ids) + 1
        assert (own[0], top[0]) == (None, None)
        forward = plain_logprobs(engine, ids)
        wanted = [forward[i, ids[i + 1]] for i in range(len(ids) - 1)] + [forward[-1].max()]
        assert own[1:] == pytest.approx(wanted, abs=2e-5)
        greedy = [int(forward[i].argmax()) == ids[i + 1] for i in range(len(ids) - 1)] + [True]
        assert [value == max(best.values()) for value, best in zip(own[1:], top[1:], strict=True)] == greedy
        seen |= set(greedy[:-1])
    assert seen == {True, False}


def test_logprobs_are_the_same_with_and_without_drafts(client: httpx.Client) -> None:
    body = {**GREEDY, "max_tokens": 24, "logprobs": 3}
    found = [post(client, PATH, {**body, "speculation": {"enabled": drafts}}) for drafts in (True, False)]
    one, other = (each["choices"][0]["logprobs"] for each in found)
    assert one["tokens"] == other["tokens"]
    assert one["token_logprobs"] == pytest.approx(other["token_logprobs"], abs=1e-4)
    assert found[0]["metrics"]["speculative_decoding"]["num_spec_steps"] > 0
    assert found[1]["metrics"]["speculative_decoding"] is None
    assert found[1]["metrics"]["outrider"]["plain_steps"] == found[1]["metrics"]["outrider"]["steps"]


@pytest.mark.parametrize(
    "asked",
    [
        {"speculation": False},
        {"speculation": {"max_tokens": 0}},
        {"disable_spec_decode": True},
        {"disable_speculative_decoding": True},
        {"speculative.n_max": 0},
        {"vllm_xargs": {"speculation": {"enabled": False}}},
        {"extra_body": {"speculation": {"enabled": False}}},
    ],
)
def test_every_way_to_switch_drafts_off(client: httpx.Client, asked: dict[str, Any]) -> None:
    found = post(client, PATH, {**GREEDY, **asked})
    assert found["metrics"]["speculative_decoding"] is None
    assert set(found["metrics"]["outrider"]["lengths"]) == {"0"}
    assert found["choices"] == post(client, PATH, GREEDY)["choices"]


def test_drafts_stay_below_the_depth_that_was_asked_for(client: httpx.Client) -> None:
    found = post(client, PATH, {**GREEDY, "max_tokens": 40, "ignore_eos": True, "speculation": {"max_tokens": 2}})
    numbers = found["metrics"]["speculative_decoding"]
    assert numbers["num_spec_tokens"] == 2
    assert len(numbers["acceptance_histogram"]) == 3
    assert set(found["metrics"]["outrider"]["lengths"]) <= {"0", "1", "2"}
    assert sum(numbers["acceptance_histogram"]) == numbers["num_spec_steps"]


@pytest.mark.parametrize("streams", [False, True])
def test_a_stop_string_ends_the_text_and_is_named(client: httpx.Client, streams: bool) -> None:
    whole = post(client, PATH, {**GREEDY, "max_tokens": 30})["choices"][0]["text"]
    stop = whole[11:16]
    body = {**GREEDY, "max_tokens": 30, "stop": ["never there", stop]}
    for keeps in (False, True):
        asked = {**body, "include_stop_str_in_output": keeps}
        if streams:
            found = [chunk["choices"][0] for chunk in chunks(client, PATH, asked)]
            text, choice = "".join(each["text"] for each in found), found[-1]
        else:
            choice = post(client, PATH, asked)["choices"][0]
            text = choice["text"]
        assert text == whole[: whole.index(stop) + (len(stop) if keeps else 0)]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


def test_a_stop_token_is_named_and_the_models_own_end_is_not(client: httpx.Client, engine: outrider.Engine) -> None:
    own = alone(engine, PROMPT, max_new_tokens=12)
    token = own.tokens[5]
    choice = post(client, PATH, {**GREEDY, "stop_token_ids": [token]})["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", token)
    end = next(iter(engine.eos_ids))
    choice = post(client, PATH, {**GREEDY, "logit_bias": {str(end): 1000}})["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"], choice["text"]) == ("stop", None, "")


def test_an_output_without_text_still_gets_a_chunk(client: httpx.Client, engine: outrider.Engine) -> None:
    end = next(iter(engine.eos_ids))
    [chunk] = chunks(client, PATH, {**GREEDY, "logit_bias": {str(end): 1000}})
    assert chunk["choices"][0]["text"] == ""
    assert chunk["choices"][0]["finish_reason"] == "stop"


def test_special_tokens_are_shown_if_asked_for(client: httpx.Client, engine: outrider.Engine) -> None:
    token = engine.tokenizer.convert_tokens_to_ids("<|user|>")
    body = {**GREEDY, "max_tokens": 2, "logit_bias": {str(token): 1000}}
    assert post(client, PATH, body)["choices"][0]["text"] == ""
    assert post(client, PATH, {**body, "skip_special_tokens": False})["choices"][0]["text"] == "<|user|><|user|>"


def test_a_prompt_can_be_cut(client: httpx.Client, engine: outrider.Engine) -> None:
    ids = engine.tokenizer("one two three four five six")["input_ids"]
    body = {**GREEDY, "prompt": ids, "return_token_ids": True, "truncate_prompt_tokens": 3}
    assert post(client, PATH, body)["choices"][0]["prompt_token_ids"] == ids[-3:]
    body["truncation_side"] = "right"
    assert post(client, PATH, body)["choices"][0]["prompt_token_ids"] == ids[:3]


def test_max_tokens_is_cut_to_the_room(client: httpx.Client, engine: outrider.Engine) -> None:
    longest = engine.parts.target.max_context
    body = {"prompt": [300] * (longest - 3), "max_tokens": 100_000, "ignore_eos": True, "temperature": 0}
    found = post(client, PATH, body)
    assert found["choices"][0]["finish_reason"] == "length"
    assert 1 <= found["usage"]["completion_tokens"] <= 3
    answer = client.post(PATH, json={**body, "prompt": [300] * longest})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_prompt_logprobs_are_by_token_id(client: httpx.Client, engine: outrider.Engine) -> None:
    ids = engine.tokenizer(PROMPT)["input_ids"]
    found = post(client, PATH, {**GREEDY, "prompt_logprobs": 1})["choices"][0]["prompt_logprobs"]
    assert found[0] is None
    forward = plain_logprobs(engine, ids)
    for i, entry in enumerate(found[1:]):
        assert entry[str(ids[i + 1])]["logprob"] == pytest.approx(float(forward[i, ids[i + 1]]), abs=2e-5)
        assert entry[str(int(forward[i].argmax()))]["rank"] == 1


def test_seeds_of_64_bits_with_a_sign_repeat(client: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 1.0, "seed": -(2**63)}
    assert post(client, PATH, body)["choices"] == post(client, PATH, body)["choices"]


def test_only_allowed_tokens_come_and_bad_words_do_not(client: httpx.Client, engine: outrider.Engine) -> None:
    whole = post(client, PATH, {**GREEDY, "return_token_ids": True})["choices"][0]
    word = whole["text"].split()[2]
    assert word not in post(client, PATH, {**GREEDY, "bad_words": [word]})["choices"][0]["text"]
    allowed = sorted(set(whole["token_ids"][:3]))
    found = post(client, PATH, {**GREEDY, "return_token_ids": True, "allowed_token_ids": allowed})["choices"][0]
    assert set(found["token_ids"]) <= set(allowed)
    answer = client.post(PATH, json={**GREEDY, "allowed_token_ids": [10**9]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "allowed_token_ids")


def test_a_stream_names_the_tokens_of_each_event_and_the_prompt_once(client: httpx.Client) -> None:
    body = {**GREEDY, "return_token_ids": True}
    whole = post(client, PATH, body)["choices"][0]
    first, *others = [chunk["choices"][0] for chunk in chunks(client, PATH, body)]
    assert first["prompt_token_ids"] == whole["prompt_token_ids"]
    assert not any("prompt_token_ids" in each for each in others)
    assert [token for each in (first, *others) for token in each["token_ids"]] == whole["token_ids"]
    assert "".join(each["text"] for each in (first, *others)) == whole["text"]


@pytest.mark.parametrize("of_the_model", [False, True])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("min_tokens", [0, 9])
def test_the_text_with_special_tokens_ends_where_the_text_without_them_ends(
    client: httpx.Client,
    engine: outrider.Engine,
    monkeypatch: pytest.MonkeyPatch,
    min_tokens: int,
    include: bool,
    of_the_model: bool,
) -> None:
    body = {**GREEDY, "max_tokens": 30, "min_tokens": min_tokens, "include_stop_str_in_output": include}
    free = post(client, PATH, {**body, "return_token_ids": True})["choices"][0]
    words = [engine.tokenizer.decode(free["token_ids"][i : i + 2])[1:] for i in (4, 8, 14)]
    if of_the_model:
        monkeypatch.setattr(engine, "stop", (words[1], words[0]))
    else:
        body["stop"] = words
    wanted = post(client, PATH, body)["choices"][0]
    assert wanted["finish_reason"] == "stop"
    assert len(wanted["text"]) < len(free["text"])
    raw = {**body, "skip_special_tokens": False}
    assert post(client, PATH, raw)["choices"][0]["text"] == wanted["text"]
    for each in (body, raw):
        assert "".join(part["choices"][0]["text"] for part in chunks(client, PATH, each)) == wanted["text"]


def test_an_empty_prompt_is_the_token_that_begins_texts(client: httpx.Client, engine: outrider.Engine) -> None:
    begin = engine.tokenizer.bos_token_id
    found, wanted = (post(client, PATH, {**GREEDY, "prompt": prompt})["choices"][0] for prompt in ("", [begin]))
    assert found["text"] == wanted["text"]


def test_offsets_are_places_in_the_text(client: httpx.Client) -> None:
    body = {**GREEDY, "prompt": "I like 😀 dogs and 猫", "logprobs": 1, "echo": True, "max_tokens": 6}
    for more in ({}, {"return_tokens_as_token_ids": True}):
        choice = post(client, PATH, {**body, **more})["choices"][0]
        offsets = choice["logprobs"]["text_offset"]
        names = post(client, PATH, body)["choices"][0]["logprobs"]["tokens"]
        for i, name in enumerate(names):
            if "�" not in name and not name.startswith("<|"):
                assert choice["text"].startswith(name, offsets[i])
        assert offsets == sorted(offsets)
