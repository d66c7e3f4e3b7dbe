"""A script that was written for transformers gives the same with Outrider in it: text, streams, stop strings."""

import functools
import gc
import re
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
    TextIteratorStreamer,
)
from transformers.generation.streamers import BaseStreamer

import outrider.integrate
from outrider import InputError, as_custom_generate
from outrider.drafters.model import ModelDrafter
from outrider.embedded import EMBEDDED_DRAFT, EMBEDDED_TARGET
from outrider.integrate.kept import _KEPT, KEPT_ENGINES
from tests.integrate.test_generate import GREEDY, NGRAM, assert_same, batch, noisy_twin
from tests.world.recurrent_zoo import tiny_recurrent
from tests.world.zoo import scrambled, tiny, tiny_config

README = Path(__file__).parents[2] / "README.md"
DRAFT = f"model:path={EMBEDDED_DRAFT}"
SCRIPT = f"""
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer, pipeline

tokenizer = AutoTokenizer.from_pretrained({str(EMBEDDED_TARGET)!r}, padding_side="left")
model = AutoModelForCausalLM.from_pretrained({str(EMBEDDED_TARGET)!r}, dtype="float32")
# here
inputs = tokenizer(["Once upon a time", "One day, a dog named Max went to the"], return_tensors="pt", padding=True)
outputs = model.generate(**inputs, max_new_tokens=24, do_sample=False, repetition_penalty=1.1)
texts = tokenizer.batch_decode(outputs, skip_special_tokens=True)

streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=5)
one = tokenizer("Lily and Tom", return_tensors="pt")
model.generate(one.input_ids, attention_mask=one.attention_mask, max_new_tokens=32, do_sample=False, streamer=streamer,
               stop_strings=[". "], tokenizer=tokenizer)
texts += list(streamer)

texts += pipeline("text-generation", model=model, tokenizer=tokenizer)("The", max_new_tokens=9, do_sample=False)
"""


class Recorder(BaseStreamer):
    """Writes down what it is given."""

    def __init__(self):
        self.calls = []

    def put(self, value):
        self.calls.append((tuple(value.shape), value.flatten().tolist()))

    def end(self):
        self.calls.append("end")


@pytest.fixture(scope="module")
def pair():
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_TARGET, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(EMBEDDED_TARGET, padding_side="left")


def run(script: str) -> list[object]:
    space: dict[str, object] = {}
    exec(compile(script, "a script", "exec"), space)
    return space["texts"]


def test_a_script_gives_the_same_with_the_lines_of_the_readme():
    [lines] = re.findall(r"^```py\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(lines.splitlines()) <= 5
    assert "outrider" in lines
    assert run(SCRIPT.replace("# here\n", lines)) == run(SCRIPT)


def test_a_streamer_is_given_what_generate_gives_it(pair):
    model, tokenizer = pair
    inputs = tokenizer("Once upon a time", return_tensors="pt")
    plain, ours = Recorder(), Recorder()
    model.generate(**inputs, max_new_tokens=20, do_sample=False, streamer=plain)
    drafted = as_custom_generate(drafter=DRAFT, tokenizer=tokenizer, streamer=ours)
    model.generate(**inputs, max_new_tokens=20, do_sample=False, custom_generate=drafted)
    assert ours.calls == plain.calls
    assert len(plain.calls) == 22


def test_a_streamer_of_several_rows_is_given_columns():
    model, inputs, calls = tiny("llama"), batch(9, 4, 14), []
    ends = int(model.generate(**inputs, **GREEDY)[1, 14 + 4])
    for how in ("streamer", "custom_generate"):
        recorder = Recorder()
        given = recorder if how == "streamer" else as_custom_generate(drafter=NGRAM, streamer=recorder)
        model.generate(**inputs, **GREEDY | {"eos_token_id": ends, "pad_token_id": 1, how: given})
        calls.append(recorder.calls)
    assert calls[0] == calls[1]
    assert any(1 in said for shape, said in calls[0][1:-1] if shape == (3,)), "some row is padded"


def test_stop_strings_end_rows_at_the_token_that_completes_them(pair):
    model, tokenizer = pair
    inputs = tokenizer(["Once upon a time", "One day, a dog"], return_tensors="pt", padding=True)
    for stop, ending in (("girl", True), (["ed Lil", " her fri"], True), (["no such thing"], False)):
        plain = model.generate(**inputs, max_new_tokens=24, do_sample=False, stop_strings=stop, tokenizer=tokenizer)
        drafted = as_custom_generate(drafter=DRAFT, stop_strings=stop, tokenizer=tokenizer)
        ours = model.generate(**inputs, max_new_tokens=24, do_sample=False, custom_generate=drafted)
        assert torch.equal(plain, ours), (tokenizer.batch_decode(plain), tokenizer.batch_decode(ours))
        assert bool((plain[:, -1] == tokenizer.pad_token_id).any()) == ending


def test_the_form_that_generate_loads_by_path_gets_streamer_and_tokenizer(pair, tmp_path):
    model, tokenizer = pair
    inputs = tokenizer("Once upon a time", return_tensors="pt")
    file = outrider.integrate.write_custom_generate(tmp_path, drafter="ngram:prompt_lookup_min=1", length="fixed:3")
    assert file.parent.joinpath("requirements.txt").read_text() == "outrider\n"
    texts = []
    for how in ({}, {"custom_generate": str(tmp_path), "trust_remote_code": True}):
        streamer = TextIteratorStreamer(tokenizer, timeout=5)
        asked = {"max_new_tokens": 24, "stop_strings": "girl", "streamer": streamer, "tokenizer": tokenizer}
        model.generate(**inputs, do_sample=False, **asked, **how)
        texts.append(list(streamer))
    assert texts[0] == texts[1]
    assert "".join(texts[0]).endswith("girl")


def test_a_model_directory_with_the_written_form_drafts_by_itself(pair, tmp_path):
    model, tokenizer = pair
    model.save_pretrained(tmp_path)
    outrider.integrate.write_custom_generate(tmp_path)
    drafting = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    ids = tokenizer("Once upon a time", return_tensors="pt").input_ids
    assert torch.equal(
        drafting.generate(ids, max_new_tokens=12, do_sample=False),
        model.generate(ids, max_new_tokens=12, do_sample=False),
    )
    assert drafting in _KEPT


def test_stop_strings_in_a_generation_config_are_used_and_left_there(pair):
    model, tokenizer = pair
    inputs = tokenizer("Once upon a time", return_tensors="pt")
    config = GenerationConfig(max_new_tokens=24, do_sample=False, stop_strings="girl")
    plain = model.generate(**inputs, generation_config=config, tokenizer=tokenizer)
    ours = outrider.integrate.generate(**inputs, model=model, generation_config=config, tokenizer=tokenizer)
    assert torch.equal(plain, ours)
    assert config.stop_strings == "girl"
    both = {"generation_config": config, "stop_strings": " time", "tokenizer": tokenizer}
    assert torch.equal(model.generate(**inputs, **both), outrider.integrate.generate(**inputs, model=model, **both))
    with pytest.raises(InputError, match="stop_strings need the model's tokenizer"):
        outrider.integrate.generate(**inputs, model=model, generation_config=config)


def test_an_engine_is_made_once_for_a_model_and_its_options():
    model, engines = tiny("llama"), []
    for drafter in (NGRAM, NGRAM, "suffix", NGRAM, "suffix:min_match=1"):
        model.generate(**batch(9), **GREEDY, custom_generate=as_custom_generate(drafter=drafter))
        engines.append(_KEPT[model][-1].engine)
    assert [engines.index(engine) for engine in engines] == [0, 0, 2, 0, 4]
    assert len(_KEPT[model]) == KEPT_ENGINES


def test_a_large_batch_runs_at_once_or_in_as_many_slots_as_were_given():
    model, inputs = tiny("llama"), batch(*range(3, 13))
    for slots, expected in ((None, 16), (3, 3)):
        assert_same(model, inputs, as_custom_generate(drafter=NGRAM, max_slots=slots), **GREEDY)
        assert _KEPT[model][-1].engine.max_slots == expected


def test_a_draft_model_may_know_fewer_tokens_than_the_targets_padding(pair):
    tokenizer = pair[1]
    padded = AutoModelForCausalLM.from_pretrained(EMBEDDED_TARGET, dtype=torch.float32)
    padded.resize_token_embeddings(padded.config.vocab_size + 64, mean_resizing=False)
    inputs = tokenizer("Once upon a time", return_tensors="pt")
    torch.manual_seed(0)
    drawn = {"do_sample": True, "top_k": 5, "max_new_tokens": 12}
    padded.generate(**inputs, **drawn, custom_generate=as_custom_generate(drafter=DRAFT, tokenizer=tokenizer))
    for parts in ({}, {"length": "svip"}, {"tree": "gumbel:branching=2x2"}, {"tree": "opt:num_nodes=8"}):
        drafted = as_custom_generate(drafter=DRAFT, tokenizer=tokenizer, **parts)
        assert_same(padded, inputs, drafted, do_sample=False, max_new_tokens=16)


@pytest.mark.parametrize("make", [lambda: tiny("llama"), lambda: tiny_recurrent("mamba2")], ids=["llama", "mamba2"])
def test_an_engine_does_not_keep_its_model_alive(make):
    model = make()
    model.generate(**batch(9), **GREEDY, custom_generate=as_custom_generate())
    gc.disable()
    try:
        seen, engine = weakref.ref(model), weakref.ref(_KEPT[model][-1].engine)
        del model
        assert seen() is None
        assert engine() is None
    finally:
        gc.enable()


@pytest.mark.usefixtures("float64_stays_float64")
def test_weights_may_change_between_calls():
    model, drafted = tiny("llama"), as_custom_generate(drafter=NGRAM)
    before = assert_same(model, batch(9), drafted, **GREEDY)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.1)
    assert not torch.equal(assert_same(model, batch(9), drafted, **GREEDY), before)


def test_a_model_that_was_cast_gets_a_new_engine_and_one_in_training_stays_so():
    model, drafted = tiny("llama"), as_custom_generate(drafter=NGRAM)
    for dtype in (torch.float64, torch.float32):
        model.to(dtype).train()
        model.model.layers[0].eval()
        model.generate(**batch(9), **GREEDY, custom_generate=drafted)
        [kept] = _KEPT[model]
        assert kept.engine.parts.target.dtype == dtype
        assert model.training
        assert model.model.layers[1].training
        assert not model.model.layers[0].training


class Broken(Exception):
    """Whatever a caller's own code may raise."""


class Breaks(BaseStreamer):
    """Raises at the fifth token."""

    def __init__(self, kind):
        self.kind, self.left = kind, 6

    def put(self, value):
        self.left -= 1
        if not self.left:
            raise self.kind

    def end(self): ...


@pytest.mark.usefixtures("float64_stays_float64")
@pytest.mark.parametrize("kind", [Broken, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["processor", "criterion", "streamer"])
def test_whatever_is_raised_meanwhile_leaves_nothing_behind(where, kind):
    model, drafter = tiny("llama").train(), ModelDrafter(lm=noisy_twin("llama", max_slots=3))
    plain = tiny("llama").generate(**batch(9, 4, 14), **GREEDY)

    def breaks(ids, scores):
        if ids.shape[1] > 18:
            raise kind
        return scores if where == "processor" else False

    given = {"processor": {"logits_processor": [breaks]}, "criterion": {"stopping_criteria": [breaks]}}.get(where, {})
    failing = as_custom_generate(drafter=drafter, max_slots=3, streamer=Breaks(kind) if where == "streamer" else None)
    with pytest.raises(kind):
        model.generate(**batch(9, 4, 14), **GREEDY, **given, custom_generate=failing)
    assert model.training
    drafted = as_custom_generate(drafter=drafter, max_slots=3)
    found = model.generate(**batch(9, 4, 14), **GREEDY, custom_generate=drafted)
    assert torch.equal(found, plain), "all slots of the draft model are free again"


def at_once(*calls):
    """What calls give that run in threads of their own."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [made.result() for made in [threads.submit(call) for call in calls]]


@pytest.mark.usefixtures("float64_stays_float64")
def test_threads_may_share_a_model_and_a_draft_model():
    model, drafter = tiny("llama").train(), ModelDrafter(lm=noisy_twin("llama", max_slots=3))
    drafted = as_custom_generate(drafter=drafter, max_slots=3)
    plain = tiny("llama").generate(**batch(9, 4, 14), **GREEDY)
    call = functools.partial(model.generate, **batch(9, 4, 14), **GREEDY, custom_generate=drafted)
    assert all(torch.equal(found, plain) for found in at_once(*[call] * 3))
    assert model.training


@pytest.mark.usefixtures("float64_stays_float64")
def test_evaluation_lasts_until_the_last_call_that_runs_has_ended():
    model, modes = tiny("llama").train(), []
    one_runs, two_run = Event(), Event()

    def first(ids, scores):
        one_runs.set()
        return two_run.wait(30)

    def second(ids, scores):
        two_run.set()
        outer.result(30)
        modes.append(model.training)
        return True

    generate = functools.partial(model.generate, **batch(9), **GREEDY, custom_generate=as_custom_generate())
    with ThreadPoolExecutor(1) as thread:
        outer = thread.submit(generate, stopping_criteria=[first])
        assert one_runs.wait(30)
        generate(stopping_criteria=[second])
    assert modes == [False]
    assert model.training


def test_threads_that_load_their_draft_models_at_once_leave_loading_as_it_was(tmp_path):
    config = tiny_config("llama")
    config.tie_word_embeddings = True
    model = scrambled(AutoModelForCausalLM.from_config(config))
    model.save_pretrained(tmp_path)
    drafted = [as_custom_generate(drafter=f"model:path={tmp_path}", length=f"fixed:{k}") for k in range(1, 9)]
    calls = [functools.partial(model.generate, **batch(9), **GREEDY, custom_generate=how) for how in drafted]
    plain = model.generate(**batch(9), **GREEDY)
    assert all(torch.equal(found, plain) for found in at_once(*calls))
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again.generate(**batch(9), **GREEDY), plain)


def test_a_call_within_a_call_has_an_engine_of_its_own():
    model, drafted, inner = tiny("llama"), as_custom_generate(drafter=NGRAM), []

    def ends(ids, scores):
        inner.append(model.generate(**batch(4), **GREEDY, custom_generate=drafted))
        return torch.tensor([ids.shape[1] == 12])

    found = model.generate(**batch(9), **GREEDY, custom_generate=drafted, stopping_criteria=[ends])
    assert found.shape[1] == 12
    assert all(torch.equal(said, model.generate(**batch(4), **GREEDY)) for said in inner)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_whose_generate_was_replaced_is_driven_by_its_own_class(compiled):
    model = torch.compile(tiny("llama"), backend="eager") if compiled else tiny("llama")
    plain = model.generate(**batch(9), **GREEDY)
    model.generate = functools.partial(outrider.integrate.generate, model=model, drafter=NGRAM)
    assert torch.equal(model.generate(**batch(9), **GREEDY), plain)


def test_generate_takes_arguments_by_position_in_the_order_of_transformers():
    model, recorder, inputs = tiny("llama"), Recorder(), batch(9)["input_ids"]
    config = GenerationConfig(**GREEDY, pad_token_id=0)
    given = (config, LogitsProcessorList(), StoppingCriteriaList([lambda ids, _: ids.shape[1] > 20]), None, None, None)
    ours = outrider.integrate.generate(inputs, *given, recorder, model=model, drafter=NGRAM)
    assert torch.equal(ours, model.generate(inputs, *given))
    assert len(recorder.calls) == 1 + 12 + 1


def test_a_head_may_keep_its_weights_in_another_shape():
    class Packed(torch.nn.Module):
        """A linear layer whose weights are one row, as those of quantised ones are."""

        def __init__(self, layer):
            super().__init__()
            self.out_features, self.in_features = layer.out_features, layer.in_features
            self.weight = torch.nn.Parameter(layer.weight.detach().reshape(1, -1))

        def forward(self, x):
            return x @ self.weight.reshape(self.out_features, self.in_features).T

    model = tiny("llama")
    model.lm_head = Packed(model.lm_head)
    assert_same(model, batch(9), as_custom_generate(drafter=NGRAM), **GREEDY)
