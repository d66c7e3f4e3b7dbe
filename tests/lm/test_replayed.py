"""Replayed forwards and chains say what eager ones say. A twin that checks addresses, inputs and outputs stands for
CUDA graphs.
"""

import numpy as np
import pytest
import torch
import transformers
from jaxtyping import Float
from packaging.version import Version
from torch import Tensor, nn

from outrider.core.types import InputError, Sampling
from outrider.drafters.model import ModelDrafter
from outrider.engine.engine import Engine
from outrider.lm.forwards import replayed
from outrider.lm.forwards.forward import Forward
from outrider.lm.forwards.recorder import RECORDERS
from outrider.lm.head import HeadLM
from outrider.lm.model import LanguageModel
from outrider.lm.protocol import Extension, Segment
from outrider.lm.slots.head_inputs import HeadInputs
from outrider.lm.target_info import TargetInfo
from tests.world.heads import HEADS, head
from tests.world.models import llama
from tests.world.parts import parts_of
from tests.world.recorder import CheckedRecorder
from tests.world.zoo import ARCHITECTURES, tiny

TAPS = (0, 2)


@pytest.fixture
def replaying(monkeypatch) -> None:
    """Forwards may be replayed on a CPU."""
    monkeypatch.setitem(RECORDERS, "cpu", CheckedRecorder)


def pair(max_slots: int = 4, pad_to: int = 1) -> list[LanguageModel]:
    """The same model, eager and replayed."""
    return [
        LanguageModel(llama(), max_slots=max_slots, pad_to=pad_to, forward=forward) for forward in ("eager", "replayed")
    ]


def farthest(found: list[Extension]) -> float:
    """How far logits and taps of two extensions are apart."""
    one, other = found
    pairs = [(one.logits, other.logits), *((one.taps[k], other.taps[k]) for k in one.taps)]
    return max(float((a - b).abs().max()) for a, b in pairs if a.numel())


def prompted(lm: LanguageModel, texts: list[list[int]]) -> list[int]:
    """Slots with these texts."""
    slots = [lm.open() for _ in texts]
    segments = [Segment(slot=s, tokens=torch.tensor(t), logits="none") for s, t in zip(slots, texts, strict=True)]
    lm.extend(segments)
    lm.commit({s: range(len(t)) for s, t in zip(slots, texts, strict=True)})
    return slots


@pytest.mark.usefixtures("replaying")
@pytest.mark.parametrize("pad_to", [1, 2])
def test_ragged_chains_and_trees_in_any_rows_say_what_eager_forwards_say(pad_to) -> None:
    lms, worst = pair(pad_to=pad_to), list[float]()
    before = lms[1].num_compiled_forwards
    slots = [prompted(lm, [[3, 1, 4], [1, 5], [9, 2, 6, 5], [7]]) for lm in lms]
    assert slots[0] == slots[1]
    tree = np.array([-1, 0, 0, -1, 3])
    batches = [
        [Segment(slot=0, tokens=torch.tensor([8]))],
        # Rows that are not the first ones, and idle rows between them.
        [Segment(slot=3, tokens=torch.tensor([8, 2])), Segment(slot=1, tokens=torch.tensor([4]), logits="last")],
        [Segment(slot=2, tokens=torch.tensor([2, 7, 1, 8, 2]), parents=tree)],
        [
            Segment(slot=1, tokens=torch.tensor([2, 7, 1, 8, 2]), parents=tree),
            Segment(slot=0, tokens=torch.tensor([6, 6]), logits=1),
            Segment(slot=2, tokens=torch.tensor([5])),
        ],
    ]
    for batch in batches * 2:
        worst.append(farthest([lm.extend(batch, TAPS) for lm in lms]))
        for lm in lms:
            lm.commit({segment.slot: [0] for segment in batch})
    assert max(worst) < 1e-12
    assert lms[1].num_compiled_forwards - before == 2 * len(batches)
    assert lms[0].num_compiled_forwards == 0


@pytest.mark.usefixtures("replaying")
def test_one_recording_serves_all_forwards_of_its_size() -> None:
    before, (_, lm) = CheckedRecorder.num_recorded, pair()
    [slot] = prompted(lm, [[3, 1, 4]])
    made = CheckedRecorder.num_recorded
    for token in range(5, 9):
        lm.extend([Segment(slot=slot, tokens=torch.tensor([token]))])
        lm.commit({slot: [0]})
        lm.extend([Segment(slot=slot, tokens=torch.tensor([token, 1, 2]))])
        lm.commit({slot: []})
    # The check of its masks was as wide as three tokens are.
    assert (made - before, CheckedRecorder.num_recorded - made) == (1, 1)


@pytest.mark.usefixtures("replaying")
def test_long_prompts_and_forwards_without_logits_are_not_recorded() -> None:
    _, lm = pair()
    before, slot = CheckedRecorder.num_recorded, lm.open()
    lm.extend([Segment(slot=slot, tokens=torch.arange(9) % 7, logits="none")])
    lm.extend([Segment(slot=slot, tokens=torch.arange(70) % 7)])
    assert CheckedRecorder.num_recorded == before


@pytest.mark.usefixtures("replaying")
def test_results_stay_as_they_are_when_others_are_computed() -> None:
    _, lm = pair()
    [slot] = prompted(lm, [[3, 1, 4]])
    found = lm.extend([Segment(slot=slot, tokens=torch.tensor([5]))], TAPS)
    kept = [found.logits.clone(), *(found.taps[k].clone() for k in TAPS)]
    lm.extend([Segment(slot=slot, tokens=torch.tensor([6]))], TAPS)
    assert all(torch.equal(a, b) for a, b in zip(kept, [found.logits, *found.taps.values()], strict=True))


@pytest.mark.usefixtures("replaying")
def test_forwards_are_recorded_anew_when_the_cache_grows(monkeypatch) -> None:
    monkeypatch.setattr(replayed, "RESERVED", 0.0)
    lms, worst = pair(), []
    for row in range(3):
        slots = [lm.open() for lm in lms]
        assert slots == [row, row]
        batch = [Segment(slot=slot, tokens=torch.tensor([3 + row])) for slot in range(row + 1)]
        worst.append(farthest([lm.extend(batch) for lm in lms]))
        for lm in lms:
            lm.commit({slot: [0] for slot in range(row + 1)})
    assert max(worst) < 1e-12


@pytest.mark.usefixtures("replaying")
def test_a_cache_that_fits_is_allocated_at_once() -> None:
    eager, lm = pair()
    generation = lm.cache.generation
    slots = prompted(lm, [[3] * 100, [4] * 5, [5]])
    lm.extend([Segment(slot=slots[0], tokens=torch.arange(90) % 7)])
    assert lm.cache.generation == generation
    assert lm.num_bytes > eager.num_bytes


@pytest.mark.usefixtures("replaying")
def test_new_weights_are_used_whether_they_change_in_place_or_move() -> None:
    lms = pair()
    assert [lm.open() for lm in lms] == [0, 0]
    batch = [Segment(slot=0, tokens=torch.tensor([3]))]

    def changed(change) -> float:
        with torch.no_grad():
            for lm in lms:
                change(lm.model.model.layers[0].mlp)
        found = farthest([lm.extend(batch) for lm in lms])
        for lm in lms:
            lm.commit({0: []})
        return found

    def in_place(mlp: nn.Module) -> None:
        mlp.up_proj.weight.mul_(2)

    def moved(mlp: nn.Module) -> None:
        mlp.up_proj.weight.data = mlp.up_proj.weight.data * 3

    def replaced(mlp: nn.Module) -> None:
        mlp.up_proj.weight = nn.Parameter(mlp.up_proj.weight * 0.1)

    assert [changed(change) < 1e-12 for change in (lambda mlp: None, in_place, moved, replaced)] == [True] * 4


@pytest.mark.usefixtures("replaying")
def test_what_cannot_be_recorded_runs_eager_with_one_warning(caplog) -> None:
    lms = [LanguageModel(llama(), forward="eager") for _ in range(2)]
    layer = lms[1].model.model.layers[1]
    layer.register_forward_hook(lambda module, given, output: output * (1.0 + 0 * output.sum().item()))
    lms[1].run_by("replayed")
    for token in (3, 4):
        batch = [Segment(slot=lm.open(), tokens=torch.tensor([token])) for lm in lms]
        assert farthest([lm.extend([segment]) for lm, segment in zip(lms, batch, strict=True)]) < 1e-12
    assert lms[1].num_compiled_forwards == 0
    assert not lms[1].replays
    assert [record.getMessage() for record in caplog.records] == [
        "forwards of llama cannot be recorded, so they run eager: operation item is not permitted while a graph is "
        "recorded"
    ]


@pytest.mark.usefixtures("replaying")
def test_the_recording_that_was_not_used_for_longest_makes_room(monkeypatch) -> None:
    monkeypatch.setattr(replayed, "MOST", 2)
    _, lm = pair()
    [slot] = prompted(lm, [[3, 1, 4]])
    before, made = CheckedRecorder.num_recorded, []
    for width in (1, 4, 1, 8, 1, 4):
        lm.extend([Segment(slot=slot, tokens=torch.arange(width))])
        lm.commit({slot: []})
        made.append(CheckedRecorder.num_recorded - before)
    # The check of its masks was of width 4.
    assert made == [1, 1, 1, 2, 2, 3]


def test_forwards_are_replayed_on_gpus_alone() -> None:
    with pytest.raises(InputError, match=r"forward=replayed is for GPUs, and llama is on cpu; leave out forward"):
        LanguageModel(llama(), forward="replayed")


WAITING = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "falcon")
"""Models whose forward waits for the number of tokens of each expert, or makes a tensor of numbers of the host."""


@pytest.mark.usefixtures("replaying")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_says_the_same_when_it_is_replayed_and_most_can_be(name) -> None:
    lms = [LanguageModel(tiny(name), max_slots=2, forward=forward) for forward in ("eager", "replayed")]
    for text in ([3, 4, 5], [3, 4]):
        slots = [prompted(lm, [text])[0] for lm in lms]
        for tokens, parents, path in (([7, 8, 9, 4], [-1, 0, 0, -1], [0, 2]), ([6], [-1], [0])):
            nodes = Segment(slot=slots[0], tokens=torch.tensor(tokens), parents=np.array(parents))
            assert farthest([lm.extend([nodes]) for lm in lms]) < 1e-12
            for lm in lms:
                lm.commit({slots[0]: path})
    # The forward of gemma3n made such a tensor in earlier versions.
    waits = name in WAITING or (name == "gemma3n" and Version(transformers.__version__) < Version("5.24"))
    assert lms[1].replays != waits


class Cheap(nn.Module):
    """Stands for a model of one layer, with keys and values of one number, whose logits are one number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.feature_size, self.vocab_size = 0, 1

    def forward(self, inputs: HeadInputs) -> Float[Tensor, "rows width 1"]:
        states = self.weight * inputs.tokens[:, None, :, None].float()
        inputs.cache.update(states, states, 0)
        return states[:, 0]

    def logits(self, hidden: Float[Tensor, "*batch 1"]) -> Float[Tensor, "*batch 1"]:
        return hidden


@pytest.mark.usefixtures("replaying")
def test_a_life_of_a_cache_makes_at_most_120_recordings() -> None:
    longest, lengths = 2**15, [2**15 - 8, 20000, 9000, 5000, 3000, 1500, 700, 400, 200, 1]
    lm = HeadLM(Cheap(), max_slots=32, max_context=longest, forward="replayed")
    first, before = lm.open(), CheckedRecorder.num_recorded
    while lm.length(first) < lengths[0]:
        count = min(2048, lengths[0] - lm.length(first))
        lm.extend([Segment(slot=first, tokens=torch.zeros(count, dtype=torch.long), logits="none")])
        lm.commit({first: range(count)})
    nodes = torch.zeros(6, dtype=torch.long)
    for length in lengths:
        lm.truncate(first, length)
        slots = [first, *(lm.copy(first, length) for _ in range(31))]
        for count in (32, 31, 20, 16, 12, 8, 5, 4, 3, 2, 1):
            for slot in slots[count:]:
                lm.release(slot)
            del slots[count:]
            for width in (1, 6):
                lm.extend([Segment(slot=slot, tokens=nodes[:width]) for slot in slots])
                lm.commit(dict.fromkeys(slots, ()))
    made = CheckedRecorder.num_recorded - before
    assert lm.num_compiled_forwards == 2 * 11 * len(lengths)
    assert 90 < made <= 120


def drafting(drafter: str, forward: Forward, device: torch.device | None = None) -> Engine:
    """An engine with a draft model or a head; both models run in the same way."""
    lm = LanguageModel(llama().to(device), max_slots=4, forward=forward)
    if drafter == "model":
        draft = ModelDrafter(lm=LanguageModel(llama(num_layers=1).to(device), max_slots=4, forward=forward))
    else:
        draft = head(drafter, TargetInfo.of(lm, None, forward=forward))
    parts = parts_of(lm, draft, length=4)
    return Engine(parts, max_slots=4)


def said(engine: Engine, temperature: float) -> list[list[int]]:
    """What three requests of different lengths get."""
    requests = zip(([3, 1, 4, 1, 5], [9, 2], [6]), (11, 4, 7), strict=True)
    ids, found = [], dict[str, list[int]]()
    for seed, (prompt, count) in enumerate(requests):
        sampling = Sampling(temperature=temperature, seed=seed)
        ids.append(engine.add(prompt, max_new_tokens=count, sampling=sampling, ignore_eos=True))
    while len(found) < len(ids):
        found |= {update.id: update.output.tokens for update in engine.step() if update.output is not None}
    return [found[id] for id in ids]


@pytest.mark.usefixtures("replaying")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafter", ["model", "eagle", "eagle3"])
def test_a_chain_is_drawn_in_one_replay_and_is_the_eager_chain(drafter, temperature) -> None:
    eager, engine = (drafting(drafter, forward) for forward in ("eager", "replayed"))
    expected = said(eager, temperature)
    assert said(engine, temperature) == expected
    lm = engine.parts.drafter.lm
    engine.add([3, 1, 4, 1, 5], max_new_tokens=40, sampling=Sampling(temperature=temperature), ignore_eos=True)
    engine.step()
    forwards, replays = lm.num_compiled_forwards, CheckedRecorder.num_replays
    engine.step()
    # The first forward of the draft, all others with their draws, and the target's.
    assert (lm.num_compiled_forwards - forwards, CheckedRecorder.num_replays - replays) == (4, 3)


@pytest.mark.usefixtures("replaying")
@pytest.mark.parametrize("drafter", HEADS)
def test_heads_draft_the_same_when_they_are_replayed(drafter) -> None:
    expected, found = (said(drafting(drafter, forward), 0.0) for forward in ("eager", "replayed"))
    assert found == expected
