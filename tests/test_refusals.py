"""What the engine cannot run is refused with a sentence that says why, and disturbs nothing that runs."""

import re

import numpy as np
import pytest
import torch

from outrider.core.types import InputError, Sampling
from tests.world.models import CONTEXT, engine
from tests.world.zoo import VOCAB


@pytest.mark.parametrize(
    ("prompt", "options", "sentence"),
    [
        ([], {}, "the prompt is empty; give at least one token"),
        ([5] * CONTEXT, {}, f"the prompt has {CONTEXT} tokens and the context {CONTEXT}; shorten it to at most"),
        ([5], {"max_new_tokens": 0}, "max_new_tokens must be >= 1 (0 is for prompt_logprobs alone), got 0"),
        ([5], {"id": "taken"}, "a request 'taken' is already running; ids must be unique"),
        ([5, VOCAB], {}, f"token id {VOCAB} is not in 0 .. {VOCAB - 1}"),
        ([5, -3], {}, f"token id -3 is not in 0 .. {VOCAB - 1}"),
        ([5], {"stop": ["."]}, "stop strings need the target's tokenizer"),
        ([5], {"sampling": Sampling(logit_bias={VOCAB: 1.0})}, "logit_bias names token ids outside"),
        ("hello", {}, "there is no tokenizer beside the target; give prompts as lists of token ids"),
        ([5], {"stop_token_ids": [-1]}, f"stop_token_ids holds token id -1, which is not in 0 .. {VOCAB - 1}"),
        ([5], {"stop_token_ids": [VOCAB]}, f"stop_token_ids holds token id {VOCAB}, which is not in"),
    ],
)
def test_what_cannot_be_run_is_refused_and_leaves_the_others_alone(prompt, options, sentence):
    busy = engine("none")
    busy.add([3, 9, 4], id="taken", max_new_tokens=4, sampling=Sampling(temperature=0))
    with pytest.raises(InputError, match=re.escape(sentence)):
        busy.add(prompt, **options)
    updates = []
    while busy.busy:
        updates += busy.step()
    assert [token for update in updates for token in update.tokens] == updates[-1].output.tokens
    assert (updates[-1].id, len(updates[-1].output.tokens)) == ("taken", 4)


@pytest.mark.parametrize(
    ("prompts", "options", "sentence"),
    [
        ("hello", {}, "prompts must be a list; for one prompt give [prompt]"),
        ([[5]], {"n": 0}, "n must be >= 1, got 0"),
        ([[5], [6]], {"sampling": [Sampling()]}, "got 1 samplings for 2 prompts; give one, or one per prompt"),
        ([[5], []], {}, "the prompt is empty"),
    ],
)
def test_a_list_of_prompts_with_one_that_cannot_be_run_leaves_nothing_behind(prompts, options, sentence):
    idle = engine("none")
    with pytest.raises(InputError, match=re.escape(sentence)):
        idle.generate(prompts, **options)
    assert not idle.busy


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_token_ids_may_be_an_array_or_a_tensor(kind):
    idle = engine("none")
    assert idle.encode(kind([3, 9, 4])) == [3, 9, 4]
    batch = torch.tensor([[3, 9, 4], [8, 2, 2]])
    outputs = idle.generate(batch, max_new_tokens=4, sampling=Sampling(temperature=0))
    assert [out.tokens for out in outputs] == [
        out.tokens for out in idle.generate(batch.tolist(), max_new_tokens=4, sampling=Sampling(temperature=0))
    ]
