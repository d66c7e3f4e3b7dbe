"""How forwards are chosen, from times and roundings that are given."""

import pytest
import torch
from packaging.version import Version

from outrider.core.types import InputError
from outrider.lm import choice
from outrider.lm.choice import BLOCK, CONTEXT, WIDE, at_hand
from outrider.lm.forwards.compilable import returning
from outrider.lm.forwards.package import PackagedForward
from outrider.lm.forwards.recorder import RECORDERS
from outrider.lm.model import LanguageModel
from tests.world.models import llama
from tests.world.recorder import CheckedRecorder, CheckedRecording


class Timed(LanguageModel):
    """Stands for a model whose forwards take given milliseconds, for a block and for many tokens."""

    widest: int | None = None

    def __init__(self, eager: tuple[float, float], compiled: tuple[float, float], max_context: int = 999) -> None:
        # Nothing else of a model is there.
        self.times = {"eager": eager, "compiled": compiled}
        self.forward, self._most = "eager", max_context

    @property
    def max_context(self) -> int:
        return self._most

    def run_by(self, forward: str) -> None:
        self.forward = forward


def timed(lm: Timed, slot: int, width: int, beside: float = 0.0) -> float:
    """The time that was given."""
    return lm.times[lm.forward][(BLOCK, WIDE).index(width)]


@pytest.mark.parametrize(
    ("eager", "compiled", "bound"),
    [
        ((10, 16), (4, 12), None),
        ((10, 16), (4, 16), None),
        ((10, 16), (4, 18), BLOCK + (WIDE - BLOCK) * 6 // 8),
        ((4, 16), (4, 18), BLOCK),
        ((4, 16), (5, 18), BLOCK),
    ],
)
def test_compiled_forwards_end_where_eager_ones_are_as_fast(monkeypatch, eager, compiled, bound) -> None:
    monkeypatch.setattr(choice, "_milliseconds", timed)
    known = {"eager": (0.0, eager[0]), "compiled": (0.0, compiled[0])}
    for names in (("compiled",), ("eager", "compiled")):
        lm = Timed(eager, compiled)
        lm.run_by("compiled")
        assert choice._narrow(lm, 0, {name: known[name] for name in names}) == bound


def test_a_short_context_has_no_forward_of_many_tokens() -> None:
    assert choice._narrow(Timed((1, 1), (0, 9), max_context=CONTEXT + WIDE - 1), 0, {}) is None


def test_compiled_forwards_that_copy_the_weights_of_experts_never_take_many_tokens() -> None:
    with_experts = Timed((10, 16), (4, 12))
    with_experts.widest = 16
    assert choice._narrow(with_experts, 0, {}) == 16


def test_a_library_that_is_missing_is_named_once_and_not_made(monkeypatch, tmp_path, caplog) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    runs = PackagedForward(LanguageModel(llama()).package)
    assert [runs.has(returning(taps)) for taps in ((0, 1), (0, 1), ())] == [False] * 3
    first, second = (record.getMessage() for record in caplog.records)
    assert first == (
        "no library computes the forward of llama and outputs hidden states 0, 1, so it runs without one; `outrider "
        "prepare` with this target and drafter compiles it, once"
    )
    assert second.startswith("no library computes the forward of llama, so it runs without one; ")
    assert list(tmp_path.iterdir()) == []


class Rounding(LanguageModel):
    """Stands for a model on a device whose single tokens round as blocks do from a number of columns on."""

    def __init__(self, device: str, columns: int, dtype: torch.dtype = torch.bfloat16) -> None:
        # Nothing else of a model is there.
        self.device, self.dtype, self.columns, self.pad_to = torch.device(device), dtype, columns, 1


@pytest.mark.parametrize(
    ("device", "dtype", "columns", "found"),
    [
        ("cpu", torch.bfloat16, 1, 1),
        ("cpu", torch.bfloat16, 2, 2),
        ("cpu", torch.bfloat16, 8, 1),
        ("cpu", torch.float32, 2, 1),
        ("cuda", torch.float32, 2, 2),
        ("cuda", torch.bfloat16, 8, 8),
        ("cuda", torch.bfloat16, 9, 16),
        ("cuda", torch.bfloat16, 17, 1),
    ],
)
def test_a_single_token_is_padded_until_it_rounds_as_in_a_block(monkeypatch, device, dtype, columns, found) -> None:
    same = torch.ones(1)
    monkeypatch.setattr(choice, "_roundings", lambda lm: [(same * (lm.pad_to >= lm.columns), same), (same, same)])
    lm = Rounding(device, columns, dtype)
    assert choice._least_padding(lm, choice._paddings(lm)) == found


@pytest.fixture
def replaying(monkeypatch, tmp_path) -> None:
    """Forwards may be replayed on a CPU, and nothing is remembered."""
    monkeypatch.setitem(RECORDERS, "cpu", CheckedRecorder)
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))


@pytest.mark.usefixtures("replaying")
@pytest.mark.parametrize(("faster", "lasting"), [("eager", True), ("replayed", True), ("replayed", False)])
def test_the_fastest_of_eager_and_replayed_forwards_is_taken(monkeypatch, faster, lasting) -> None:
    monkeypatch.setattr(choice, "_milliseconds", lambda lm, slot, width: 1.0 if lm.forward == faster else 2.0)
    lm = LanguageModel(llama())
    found = choice.choose(lm, forward=None, pad_to=None, lasting=lasting)
    assert (found.forward, lm.forward, lm.replays) == (faster, faster, faster == "replayed")
    assert found.milliseconds == {name: (1.0, 1.0) if name == faster else (2.0, 2.0) for name in ("eager", "replayed")}


@pytest.mark.usefixtures("replaying")
def test_a_model_with_a_single_slot_is_checked_and_timed() -> None:
    lm = LanguageModel(llama(), max_slots=1)
    found = choice.choose(lm, forward=None, pad_to=None)
    assert list(found.milliseconds) == ["eager", "replayed"]
    lm.release(lm.open())


@pytest.mark.usefixtures("replaying")
def test_a_disturbance_does_not_hide_the_fastest_kind(monkeypatch) -> None:
    turns: list[str] = []

    def disturbed(lm: LanguageModel, slot: int, width: int) -> float:
        turns.append(lm.forward)
        usual = 1.0 if lm.forward == "replayed" else 2.0
        return 3 * usual if turns == ["eager", "eager", "replayed"] else usual

    monkeypatch.setattr(choice, "_milliseconds", disturbed)
    found = choice.choose(LanguageModel(llama()), forward=None, pad_to=None)
    assert (found.forward, found.milliseconds["replayed"]) == ("replayed", (1.0, 1.0))


@pytest.mark.usefixtures("replaying")
def test_forwards_that_cannot_be_recorded_are_not_chosen(monkeypatch, caplog) -> None:
    monkeypatch.setattr(choice, "_milliseconds", lambda lm, slot, width: 1.0 if lm.forward == "replayed" else 2.0)
    model = llama()
    model.model.layers[1].register_forward_hook(lambda module, given, output: output + 0 * output.sum().item())
    found = choice.choose(LanguageModel(model), forward=None, pad_to=None)
    assert (found.forward, list(found.milliseconds)) == ("eager", ["eager"])
    assert [record.getMessage()[:40] for record in caplog.records] == ["forwards of llama cannot be recorded, so"]


@pytest.mark.usefixtures("replaying")
@pytest.mark.parametrize(
    ("eager", "replayed", "taken"),
    [
        ((0, 0), (0.05, 0.05), True),
        ((0, 0), (0.12, 0.05), False),
        ((0.05, 0), (0.12, 0.05), True),
        ((0.05, 0), (0.12, 0.12), False),
        ((0.05, 0.05), (0.12, 0.05), False),
    ],
)
def test_forwards_below_float32_are_judged_at_tokens_where_eager_ones_are_near(
    monkeypatch, eager, replayed, taken
) -> None:
    off, extend = {"eager": eager, "replayed": replayed}, LanguageModel.extend

    def rounded(lm: LanguageModel, segments, **options):
        output = extend(lm, segments, **options)
        elsewhere = int(segments[0].tokens[0]) != 3
        output.logits[:, 0] += off[lm.forward][elsewhere] * (output.logits.max() - output.logits.min())
        return output

    lm = LanguageModel(llama())
    lm.dtype = torch.bfloat16
    monkeypatch.setattr(LanguageModel, "extend", rounded)
    if taken:
        lm.run_by("replayed")
        assert lm.forward == "replayed"
    else:
        with pytest.raises(InputError, match="does not say what the model says"):
            lm.run_by("replayed")


@pytest.mark.usefixtures("replaying")
def test_replayed_forwards_that_say_something_else_are_not_chosen(monkeypatch, caplog) -> None:
    monkeypatch.setattr(CheckedRecording, "replay", lambda recording: None)
    found = choice.choose(LanguageModel(llama()), forward=None, pad_to=None)
    assert found.forward == "eager"
    assert "the replayed forward of llama does not say what the model says" in caplog.text
    with pytest.raises(InputError, match="choose forward=eager"):
        LanguageModel(llama(), forward="replayed")


def test_where_torch_cannot_compile_all_forwards_none_is_compiled(monkeypatch) -> None:
    monkeypatch.setattr("outrider.lm.model.COMPILES", Version("99"))
    lm = LanguageModel(llama(), max_slots=2)
    assert "forward=compiled needs torch 99 or later" in str(lm.why_not("compiled"))
    assert at_hand(lm) == ["eager"]
    with pytest.raises(InputError, match="choose another forward"):
        LanguageModel(llama(), max_slots=2, forward="compiled")


@pytest.mark.parametrize("columns", [1, 2])
def test_roundings_are_compared_at_some_places_behind_one_text(columns) -> None:
    lm = LanguageModel(llama(), max_slots=2)
    lm.pad_to, before = columns, lm.num_forwards
    pairs = choice._roundings(lm)
    assert lm.num_forwards - before == 1 + 3 * choice.PLACES
    assert len(pairs) == choice.PLACES
    text = choice._text(lm, CONTEXT + choice.PLACES * BLOCK)
    with torch.inference_mode():
        whole = lm.model(text[None]).logits[0]
    for (alone, in_a_block), place in zip(pairs, range(CONTEXT + BLOCK - 1, len(text), BLOCK), strict=True):
        assert torch.allclose(alone[0], whole[place], atol=1e-5)
        assert torch.allclose(in_a_block[0], whole[place], atol=1e-5)
    assert lm.length(lm.open()) == 0
    lm.open()


def test_a_slow_forward_is_not_repeated_for_long(monkeypatch) -> None:
    """One of half a second runs three times, one of a second twice, and once beside one that is much faster."""
    lm, times = LanguageModel(llama(), max_slots=1), {"now": 0.0, "takes": 0.5}
    extend, slot = lm.extend, lm.open()

    def slowly(segments, **options):
        times["now"] += times["takes"]
        return extend(segments, **options)

    monkeypatch.setattr(lm, "extend", slowly)
    monkeypatch.setattr(choice.time, "perf_counter", lambda: times["now"])
    counts = []
    for takes, beside in ((0.01, 1e9), (0.2, 1e9), (0.45, 1e9), (0.6, 1e9), (0.6, 160), (0.6, 140), (0.05, 1)):
        times["takes"], before = takes, lm.num_forwards
        assert choice._milliseconds(lm, slot, 1, beside) == pytest.approx(1000 * takes)
        counts.append(lm.num_forwards - before)
    assert counts == [1 + 7, 3, 3, 2, 2, 1, 3]  # The first one reads the text.
    assert lm.length(slot) == choice.BEFORE
