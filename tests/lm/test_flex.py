"""Models loaded with `flex_attention` say what the same weights say with `eager`, and leave the compiler as it was."""

import threading

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_mask
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import outrider
from outrider.drafters.model import ModelDrafter
from outrider.engine.engine import Engine
from outrider.lm.hf import flex
from outrider.lm.hf.capabilities import capabilities
from outrider.lm.model import LanguageModel
from outrider.lm.open import as_lm
from outrider.lm.protocol import Segment
from outrider.trees.chain import ChainTree
from outrider.trees.gumbel import GumbelTree
from outrider.trees.protocol import Tree
from outrider.verifiers.match import MatchVerifier
from tests.lm.oracle import Growth, Pair
from tests.lm.test_model import draw, grow_levels, prefill
from tests.world.parts import parts_of
from tests.world.recurrent_zoo import tiny_recurrent
from tests.world.zoo import ARCHITECTURES, VOCAB, scrambled, tiny

KINDS = [name for name in ARCHITECTURES if name not in ("gpt2", "bloom", "falcon", "gpt_oss")]
"""Those that transformers lets run with `flex_attention`, on CPUs too."""
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]),
]


def six_heads(attention: str) -> LlamaForCausalLM:
    """A number of heads that is no power of two, for which transformers repeats keys."""
    small = {"hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 384}
    config = LlamaConfig(vocab_size=VOCAB, num_attention_heads=6, num_key_value_heads=2, **small)
    return scrambled(LlamaForCausalLM._from_config(config, attn_implementation=attention).double().eval())


def model_of(name: str, attention: str) -> PreTrainedModel:
    return six_heads(attention) if name == "six heads" else tiny(name, attention=attention)


@pytest.mark.parametrize("name", [*KINDS, "six heads"])
def test_trees_chains_and_prompts_in_ragged_batches_say_what_eager_attention_says(name: str) -> None:
    rng = np.random.default_rng(0)
    lm = LanguageModel(model_of(name, "flex_attention"), max_slots=3, max_context=160)
    pair = Pair(lm=lm, reference=model_of(name, "eager"))
    slots = [pair.open() for _ in range(3)]
    prefill(pair, slots, [50, 33, 41], 2, rng)
    grow_levels(pair, slots, rng)
    pair.commit({slots[0]: [2, 4, 6, 7, 8], slots[1]: [0, 1, 2], slots[2]: [4]})
    pair.extend([Growth(slot=s, tokens=draw(rng, 4)) for s in (slots[2], slots[0])])
    pair.commit({slots[0]: [0], slots[2]: [0, 1, 2, 3], slots[1]: []})
    pair.release(slots[0])
    pair.extend([Growth(slot=slots[1], tokens=draw(rng, 1))])


def test_blocks_beyond_the_first_are_seen_as_storage_grows() -> None:
    rng = np.random.default_rng(1)
    pair = Pair(lm=LanguageModel(tiny("llama", attention="flex_attention"), max_slots=2), reference=tiny("llama"))
    slots = [pair.open(), pair.open()]
    prefill(pair, slots, [250, 140], 1, rng)
    pair.extend([Growth(slot=s, tokens=draw(rng, 20), parents=[-1, *range(18), 3]) for s in slots])


def test_a_block_mask_shows_what_it_was_given() -> None:
    seen = torch.rand(3, 5, 150) < 0.5
    mask = flex.block_mask(seen)
    assert mask.shape == (3, 1, 5, 150)
    shown = create_mask(lambda b, h, q, k: mask.mask_mod(b, h, q, k), 3, 1, 5, 150, device="cpu")
    assert torch.equal(shown[:, 0], seen)


def engines(dtype: torch.dtype, device: str) -> dict[str, Engine]:
    """A chain and a tree, from a draft model that is the first layer of the target; and a chain found in the text."""
    model, short = (tiny("llama", attention="flex_attention").to(device, dtype) for _ in range(2))
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    short.model.layers, short.config.num_hidden_layers = short.model.layers[:1], 1

    def drafting(tree: Tree) -> Engine:
        parts = parts_of(
            LanguageModel(model, max_slots=3),
            ModelDrafter(lm=LanguageModel(short, max_slots=3)),
            tree=tree,
            verifier=MatchVerifier(),
            length=4,
        )
        return Engine(parts, max_slots=3)

    return {
        "chain": drafting(ChainTree()),
        "tree": drafting(GumbelTree(branching=(3, 2, 1, 1))),
        "ngram": outrider.load(model, drafter="ngram:prompt_lookup_min=1", length="fixed:5", max_slots=3),
    }


@pytest.mark.filterwarnings("ignore:flex_attention called without", "ignore:_compile flag on create_block_mask")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_greedy_output_is_that_of_generate_with_eager_and_with_flex_attention(dtype: torch.dtype, device: str) -> None:
    prompts, count = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7, 9, 3]], 12
    greedy = outrider.Sampling(temperature=0)
    plain = {}
    for attention in ("eager", "flex_attention"):
        model = tiny("llama", attention=attention).to(device, dtype)
        model.generation_config.eos_token_id = None
        with torch.compiler.set_stance("force_eager"):
            runs = [
                model.generate(torch.tensor([p], device=device), max_new_tokens=count, do_sample=False) for p in prompts
            ]
        plain[attention] = [run[0, len(p) :].tolist() for run, p in zip(runs, prompts, strict=True)]
    assert plain["eager"] == plain["flex_attention"]
    for name, engine in engines(dtype, device).items():
        together = engine.generate(prompts, max_new_tokens=count, sampling=greedy)
        assert [out.tokens for out in together] == plain["eager"], name
        assert all(out.num_draft_tokens > 0 for out in together), name
        [alone] = engine.generate(prompts[:1], max_new_tokens=count, sampling=greedy)
        assert alone.tokens == together[0].tokens, name


def test_functions_of_others_are_compiled_again_behind_every_forward() -> None:
    """Also behind one that fails, and when the forwards of two threads overlap."""
    calls = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]):
        calls.append(graph)
        return graph.forward

    def compiles() -> bool:
        calls.clear()
        torch.compiler.reset()
        torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(2))
        return bool(calls)

    lm = LanguageModel(tiny("llama", attention="flex_attention"), max_slots=1)
    lm.extend([Segment(slot=lm.open(), tokens=torch.tensor([3, 4]))])
    assert compiles()
    with flex.uncompiled():
        assert not compiles()
    with pytest.raises(ZeroDivisionError), flex.uncompiled():
        raise ZeroDivisionError
    assert compiles()

    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))
    found = []

    def first() -> None:
        with flex.uncompiled():
            first_is_in.set()
            second_is_in.wait(10)
        first_is_out.set()

    thread = threading.Thread(target=first)
    thread.start()
    first_is_in.wait(10)
    with flex.uncompiled():
        second_is_in.set()
        first_is_out.wait(10)
        found.append(compiles())
    thread.join()
    assert found == [False]
    assert compiles()


def test_what_cannot_work_is_said() -> None:
    model = tiny("llama", attention="flex_attention")
    with pytest.raises(outrider.InputError, match="flex_attention runs uncompiled here"):
        LanguageModel(model, forward="compiled")
    lines = {line.feature: line for line in capabilities(model)}
    assert not lines["compiled forwards"].supported
    assert lines["attention implementation"].reason.startswith("flex_attention, exact")
    sinks = tiny("gpt_oss", attention="flex_attention")
    with pytest.raises(outrider.InputError, match=r"gpt_oss, which has attention sinks .*attn_implementation='eager'$"):
        as_lm(sinks, max_slots=1)
    hybrid = tiny_recurrent("lfm2", attention="flex_attention")
    with pytest.raises(outrider.InputError, match="lfm2, which hands the mask to recurrent layers"):
        as_lm(hybrid, max_slots=1)
    unknown = tiny("gpt2")
    unknown.config._attn_implementation = "flex_attention"
    with pytest.raises(outrider.InputError, match="gpt2, which transformers does not run so"):
        as_lm(unknown, max_slots=1)
