"""transformers' own generate answers as the engine does, and its model stays as it was."""

import outrider
from outrider import Sampling
from outrider.bench.side_by_side.transformers_generate import generate

GREEDY = Sampling(temperature=0)


def test_transformers_and_the_engine_say_the_same_alone_and_in_a_padded_batch():
    engine = outrider.load(dtype="float32", max_slots=2)
    texts = ("Once upon a time, there was a little", "One day", "The dog and the cat went to")
    prompts = [engine.encode(text) for text in texts]
    model = engine.parts.target.model
    usual = model.generation_config.eos_token_id
    ours = engine.generate(prompts, max_new_tokens=8, sampling=GREEDY, ignore_eos=True)
    together = generate(model, prompts, max_new_tokens=8, sampling=GREEDY)
    assert [list(tokens) for tokens in together.tokens] == [list(output.tokens) for output in ours]
    assert together.forwards == 8
    assert usual is not None
    assert model.generation_config.eos_token_id == usual


def test_an_output_ends_with_its_end_token():
    engine = outrider.load(dtype="float32", max_slots=1)
    prompt = engine.encode("Once upon a time")
    model = engine.parts.target.model
    [whole] = generate(model, [prompt], max_new_tokens=8, sampling=GREEDY).tokens
    [cut] = generate(model, [prompt], max_new_tokens=8, sampling=GREEDY, eos_ids=frozenset({whole[4]})).tokens
    assert cut == whole[: whole.index(whole[4]) + 1]
