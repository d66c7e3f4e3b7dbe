"""A language model over slots says what the plain model says, whatever stands beside it in batch and cache."""

import numpy as np
import pytest
import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.lm.model import LanguageModel
from outrider.lm.protocol import Segment
from tests.lm.oracle import Growth, Pair
from tests.world.zoo import ARCHITECTURES, VOCAB, tiny


def draw(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(0, VOCAB, count).tolist()


def prefill(pair: Pair, slots: list[int], lengths: list[int], chunks: int, rng: np.random.Generator) -> None:
    """Prefill ragged prompts in as many chunks, all slots together."""
    for chunk in range(chunks):
        sizes = [n // chunks + (n % chunks if chunk == chunks - 1 else 0) for n in lengths]
        kinds = ["last" if s % 2 == chunk % 2 else "none" for s in slots]
        pair.extend(
            [Growth(slot=s, tokens=draw(rng, n), logits=k) for s, n, k in zip(slots, sizes, kinds, strict=True)]
        )
        pair.commit({s: range(n) for s, n in zip(slots, sizes, strict=True)})


def grow_levels(pair: Pair, slots: list[int], rng: np.random.Generator) -> None:
    """A ragged tree per slot: two levels, then a third only in some slots, each by its own forward."""
    first, second, third = slots
    pair.extend(
        [
            Growth(slot=third, tokens=draw(rng, 4), parents=[-1, 0, 1, 0]),
            Growth(slot=first, tokens=draw(rng, 3), parents=[-1, -1, -1]),
            Growth(slot=second, tokens=draw(rng, 2)),
        ]
    )
    pair.extend(
        [
            Growth(slot=first, tokens=draw(rng, 4), parents=[0, 2, 0, 4]),
            Growth(slot=second, tokens=draw(rng, 2)),
            Growth(slot=third, tokens=draw(rng, 1), parents=[-1]),
        ]
    )
    pair.extend([Growth(slot=second, tokens=draw(rng, 2), parents=[1, 3]), Growth(slot=first, tokens=draw(rng, 2))])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_node_says_what_a_plain_run_over_its_root_path_says(name: str) -> None:
    rng = np.random.default_rng(0)
    pair = Pair(lm=LanguageModel(tiny(name), max_slots=3, max_context=160))
    slots = [pair.open() for _ in range(3)]
    prefill(pair, slots, [50, 33, 41], 3, rng)
    grow_levels(pair, slots, rng)
    pair.commit({slots[0]: [2, 4, 6, 7, 8], slots[1]: [0, 1, 2], slots[2]: [4]})
    grow_levels(pair, slots, rng)
    pair.commit({slots[0]: [0, 3], slots[1]: [0, 1, 4], slots[2]: [0, 1, 2]})
    pair.release(slots[0])
    slots[0] = pair.open()
    prefill(pair, [slots[0]], [21], 2, rng)
    grow_levels(pair, slots, rng)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_prompts_in_wide_chunks_are_read_as_by_a_plain_run(name: str) -> None:
    rng = np.random.default_rng(5)
    pair = Pair(lm=LanguageModel(tiny(name), max_slots=2, max_context=300))
    slots = [pair.open(), pair.open()]
    for sizes in ((40, 40), (40, 37), (40, 45)):
        pair.extend([Growth(slot=s, tokens=draw(rng, n), logits="last") for s, n in zip(slots, sizes, strict=True)])
        pair.commit({s: range(n) for s, n in zip(slots, sizes, strict=True)})
    pair.extend([Growth(slot=slots[0], tokens=draw(rng, 3), parents=[-1, 0, 0])])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_both_kernels_are_exact(name: str, attention: str) -> None:
    rng = np.random.default_rng(1)
    pair = Pair(lm=LanguageModel(tiny(name, attention=attention), max_slots=3, pad_to=3))
    slots = [pair.open() for _ in range(3)]
    prefill(pair, slots, [13, 2, 30], 1, rng)
    grow_levels(pair, slots, rng)


def test_a_batch_over_rows_that_are_not_neighbours_is_exact() -> None:
    rng = np.random.default_rng(2)
    pair = Pair(lm=LanguageModel(tiny("llama"), max_slots=5))
    slots = [pair.open() for _ in range(5)]
    prefill(pair, slots, [9, 14, 5, 11, 3], 1, rng)
    grow_levels(pair, [slots[4], slots[0], slots[2]], rng)
    pair.release(slots[1])
    grow_levels(pair, [slots[3], slots[2], slots[4]], rng)


def test_released_slots_are_reused_and_survivors_keep_what_they_hold() -> None:
    rng = np.random.default_rng(3)
    pair = Pair(lm=LanguageModel(tiny("mistral"), max_slots=3))
    slots = [pair.open() for _ in range(3)]
    prefill(pair, slots, [20, 12, 17], 1, rng)
    pair.extend([Growth(slot=slots[2], tokens=draw(rng, 3), parents=[-1, -1, 1])])
    pair.release(slots[0])
    pair.extend([Growth(slot=slots[2], tokens=draw(rng, 2), parents=[0, 2])])
    pair.commit({slots[2]: [1, 2, 4]})
    again = pair.open()
    assert pair.lm.length(again) == 0
    prefill(pair, [again], [6], 1, rng)
    grow_levels(pair, [again, slots[1], slots[2]], rng)


def test_storage_grows_without_loss() -> None:
    rng = np.random.default_rng(4)
    pair = Pair(lm=LanguageModel(tiny("llama"), max_slots=5, max_context=384))
    first = pair.open()
    prefill(pair, [first], [250], 1, rng)
    small = pair.lm.num_bytes
    pair.extend([Growth(slot=first, tokens=draw(rng, 20), logits="last")])
    assert pair.lm.num_bytes > small
    others = [pair.open() for _ in range(4)]
    prefill(pair, others, [5, 1, 8, 2], 1, rng)
    pair.extend([Growth(slot=first, tokens=draw(rng, 2))])
    pair.commit({first: range(22)})
    pair.extend([Growth(slot=first, tokens=draw(rng, 384 - 272), logits="last")])


def test_truncated_tokens_are_forgotten() -> None:
    rng = np.random.default_rng(5)
    pair = Pair(lm=LanguageModel(tiny("gemma3"), max_slots=2))
    slot = pair.open()
    prefill(pair, [slot], [40], 1, rng)
    pair.extend([Growth(slot=slot, tokens=draw(rng, 3), parents=[-1, -1, 0])])
    pair.truncate(slot, 31)
    assert pair.lm.length(slot) == 31
    pair.extend([Growth(slot=slot, tokens=draw(rng, 3), parents=[-1, -1, 0])])
    with pytest.raises(ValueError, match="31 committed tokens, cannot keep 32"):
        pair.lm.truncate(slot, 32)


def test_an_empty_path_drops_what_is_pending_and_unnamed_slots_keep_it() -> None:
    rng = np.random.default_rng(6)
    pair = Pair(lm=LanguageModel(tiny("llama"), max_slots=2))
    slots = [pair.open(), pair.open()]
    prefill(pair, slots, [7, 4], 1, rng)
    pair.extend([Growth(slot=s, tokens=draw(rng, 2), parents=[-1, -1]) for s in slots])
    pair.commit({slots[0]: []})
    assert [pair.lm.length(s) for s in slots] == [7, 4]
    pair.extend([Growth(slot=s, tokens=draw(rng, 2), parents=[-1, 0]) for s in slots])


@pytest.mark.parametrize("name", [n for n in ARCHITECTURES if n != "gemma3n"])
def test_taps_are_the_inputs_of_layers_and_the_raw_output_of_the_last(name: str) -> None:
    rng = np.random.default_rng(7)
    lm = LanguageModel(tiny(name), max_slots=2)
    taps = tuple(range(lm.num_layers + 1))
    prompts = [draw(rng, 12), draw(rng, 5)]
    slots = [lm.open(), lm.open()]
    segments = [Segment(slot=s, tokens=torch.tensor(p), logits="none") for s, p in zip(slots, prompts, strict=True)]
    extension = lm.extend(segments[::-1], taps)
    leaving = []
    layers = lm.anatomy.layers[-1].register_forward_hook(lambda _, __, out: leaving.append(out))
    for prompt, rows in zip(prompts, (slice(5, 17), slice(0, 5)), strict=True):
        with torch.no_grad():
            states = lm.model(torch.tensor([prompt]), output_hidden_states=True, use_cache=False).hidden_states
        for k in taps[:-1]:
            torch.testing.assert_close(extension.taps[k][rows], states[k][0], atol=1e-10, rtol=0)
        last = leaving.pop()
        last = last[0] if isinstance(last, tuple) else last
        torch.testing.assert_close(extension.taps[taps[-1]][rows], last[0], atol=1e-10, rtol=0)
    layers.remove()


def test_nothing_stays_hooked() -> None:
    lm = LanguageModel(tiny("llama"), max_slots=1)
    slot = lm.open()
    lm.extend([Segment(slot=slot, tokens=torch.tensor([1, 2]))], taps=(0, 3))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in lm.anatomy.layers)
    assert lm.extend([Segment(slot=slot, tokens=torch.tensor([1, 2]))]).taps == {}


def test_logits_come_in_the_order_of_the_segments_and_only_where_wanted() -> None:
    rng = np.random.default_rng(8)
    pair = Pair(lm=LanguageModel(tiny("qwen3"), max_slots=4))
    slots = [pair.open() for _ in range(4)]
    kinds = ("none", "all", "last", "all")
    growths = [
        Growth(slot=s, tokens=draw(rng, n), logits=k) for s, n, k in zip(slots[::-1], (6, 2, 9, 1), kinds, strict=True)
    ]
    assert len(pair.extend(growths).logits) == 4
    nothing = pair.extend([Growth(slot=s, tokens=draw(rng, 2), logits="none") for s in slots]).logits
    assert nothing.shape == (0, VOCAB)


def test_one_extend_is_one_forward() -> None:
    lm = LanguageModel(tiny("llama"), max_slots=2)
    slots = [lm.open(), lm.open()]
    assert lm.num_forwards == 0
    lm.extend([Segment(slot=s, tokens=torch.arange(3 + s)) for s in slots])
    assert lm.num_forwards == 1
    assert lm.extend([Segment(slot=slots[0], tokens=torch.arange(0))]).logits.shape == (0, VOCAB)
    lm.commit({s: [0] for s in slots})
    assert lm.num_forwards == 1


def test_an_accepted_prefix_of_a_chain_moves_no_memory() -> None:
    rng = np.random.default_rng(9)
    lm = LanguageModel(tiny("llama"), max_slots=2)
    slots = [lm.open(), lm.open()]
    lm.extend([Segment(slot=s, tokens=torch.tensor(draw(rng, 6))) for s in slots])
    lm.commit({slots[0]: [0, 1, 2, 3], slots[1]: [0]})
    assert lm.bytes_moved == 0
    lm.extend([Segment(slot=slots[0], tokens=torch.tensor([1, 2, 3]), parents=np.array([-1, 0, 0]))])
    lm.commit({slots[0]: [0, 2]})
    per_position = lm.num_bytes // (2 * 256)
    assert lm.bytes_moved == per_position


def test_padding_changes_nothing_and_pads_the_head_too() -> None:
    rng = np.random.default_rng(10)
    model = tiny("qwen2")
    widths = []
    handle = model.lm_head.register_forward_hook(lambda _, args, __: widths.append(args[0].shape[1]))
    pair = Pair(lm=LanguageModel(model, max_slots=2, pad_to=4))
    slots = [pair.open(), pair.open()]
    prefill(pair, slots, [9, 3], 1, rng)
    widths.clear()
    pair.lm.extend([Segment(slot=slots[0], tokens=torch.tensor([5]))])
    assert widths == [4]
    handle.remove()
    pair.twins[slots[0]].pending, pair.twins[slots[0]].parents = [5], [-1]
    pair.extend([Growth(slot=s, tokens=draw(rng, 1)) for s in slots])


def test_padded_vocabularies_are_cut() -> None:
    pair = Pair(lm=LanguageModel(tiny("llama"), max_slots=1, vocab_size=50))
    logits = pair.lm.extend([Segment(slot=pair.open(), tokens=torch.tensor([3, 4, 5]))]).logits
    torch.testing.assert_close(logits[-1], pair.plain([[3, 4, 5]])[0][:50], atol=1e-10, rtol=0)


class Refuse(TorchDispatchMode):
    """Raises where the host would wait for the device: reading a number, or a shape that depends on numbers."""

    READS = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten._unique2")

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        if str(func).rpartition(".")[0] in self.READS:
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


def test_neither_extend_nor_commit_waits_for_the_device() -> None:
    lm = LanguageModel(tiny("llama"), max_slots=3)
    slots = [lm.open() for _ in range(3)]
    tokens = torch.arange(8)
    with Refuse(), pytest.raises(AssertionError, match="waits for the device"):
        tokens[3].item()
    with Refuse():
        lm.extend([Segment(slot=s, tokens=tokens[: 4 + s], logits="last") for s in slots])
        lm.commit({s: range(4 + s) for s in slots})
        lm.extend(
            [Segment(slot=slots[0], tokens=tokens, parents=np.array([-1, 0, 0, 1, 1, 2, 2, -1]))]
            + [Segment(slot=s, tokens=tokens[:3]) for s in slots[1:]],
            taps=(0, 2),
        )
        lm.commit({slots[0]: [0, 2, 5], slots[1]: [0], slots[2]: []})
    assert [lm.length(s) for s in slots] == [7, 6, 6]


def test_full_slots_and_full_models_say_so_and_change_nothing() -> None:
    rng = np.random.default_rng(11)
    pair = Pair(lm=LanguageModel(tiny("llama"), max_slots=1, max_context=12))
    slot = pair.open()
    with pytest.raises(RuntimeError, match="all 1 slots are taken"):
        pair.lm.open()
    prefill(pair, [slot], [9], 1, rng)
    pair.extend([Growth(slot=slot, tokens=draw(rng, 2), parents=[-1, -1])])
    with pytest.raises(RuntimeError, match="9 committed and 2 pending tokens; 3 more pass max_context=12"):
        pair.lm.extend([Segment(slot=slot, tokens=torch.tensor([1, 2, 4]))])
    pair.extend([Growth(slot=slot, tokens=draw(rng, 1), parents=[0])])


def test_wrong_calls_raise_and_change_nothing() -> None:
    pair = Pair(lm=LanguageModel(tiny("llama"), max_slots=2))
    slot = pair.open()
    pair.extend([Growth(slot=slot, tokens=[1, 2, 3], parents=[-1, 0, 0])])
    one = torch.tensor([1])
    with pytest.raises(ValueError, match="is no path from the root"):
        pair.lm.commit({slot: [0, 1, 2]})
    with pytest.raises(ValueError, match="is no path from the root"):
        pair.lm.commit({slot: [0, 3]})
    with pytest.raises(ValueError, match="must stand before them"):
        pair.lm.extend([Segment(slot=slot, tokens=one, parents=np.array([3]))])
    with pytest.raises(ValueError, match="two segments of one forward"):
        pair.lm.extend([Segment(slot=slot, tokens=one), Segment(slot=slot, tokens=one)])
    with pytest.raises(RuntimeError, match="slot 7 is not open"):
        pair.lm.extend([Segment(slot=7, tokens=one)])
    with pytest.raises(ValueError, match=r"taps must be in 0\.\.3"):
        pair.lm.extend([Segment(slot=slot, tokens=one)], taps=(4,))
    pair.extend([Growth(slot=slot, tokens=[4], parents=[2])])
    pair.commit({slot: [0, 2, 3]})
    pair.extend([Growth(slot=slot, tokens=[4])])


def test_padding_beside_a_slot_that_is_full_hurts_nothing() -> None:
    rng = np.random.default_rng(12)
    pair = Pair(lm=LanguageModel(tiny("llama"), max_slots=2, max_context=255, pad_to=3))
    full, other = pair.open(), pair.open()
    prefill(pair, [full, other], [253, 7], 1, rng)
    pair.extend([Growth(slot=full, tokens=draw(rng, 1)), Growth(slot=other, tokens=draw(rng, 9))])
    pair.extend([Growth(slot=full, tokens=draw(rng, 1))])
    pair.commit({full: [0, 1], other: range(9)})
    pair.truncate(full, 254)
    pair.extend([Growth(slot=full, tokens=draw(rng, 1)), Growth(slot=other, tokens=draw(rng, 5))])
