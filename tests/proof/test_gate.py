"""What the gate found is remembered for the pair, the settings, the source and the machine that it was found of."""

import importlib.metadata
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import outrider
from outrider.core.types import Sampling
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.engine.engine import Engine
from outrider.host import remembered
from outrider.lengths.fixed import FixedLength
from outrider.lm.fingerprint import fingerprint, instruction_sets, machine, source
from outrider.lm.model import LanguageModel
from outrider.lm.tabular import TabularLM, random_rows
from outrider.lm.translated import Translated
from outrider.lm.vocabulary import translation
from outrider.proof.gate import PACKAGE, _read, gate, key, openings
from outrider.verifiers.block import BlockVerifier
from tests.world.models import engine, llama
from tests.world.parts import parts_of

pytestmark = pytest.mark.usefixtures("fewer_draws")
PROMPTS = [[1], [2, 3]]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package of two files."""
    place = tmp_path / "package"
    (place / "room").mkdir(parents=True)
    (place / "one.py").write_text("x = 1\n")
    (place / "room" / "two.py").write_text("y = 2\n")
    return place


def with_models(target: nn.Module, draft: nn.Module, **others: object) -> Engine:
    """An engine over these two models."""
    parts = parts_of(LanguageModel(target, max_slots=2, **others), ModelDrafter(lm=LanguageModel(draft, max_slots=2)))
    return Engine(parts, max_slots=2)


def everything(model: nn.Module) -> dict[str, torch.Tensor]:
    """All weights and all buffers, those too that are not saved."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def test_a_changed_byte_anywhere_in_any_weight_gives_another_key(package):
    models = {"target": llama(), "draft": llama(num_layers=1)}
    made = with_models(models["target"], models["draft"])
    keys = {key(made, PROMPTS, package)}
    for role, model in models.items():
        for name, tensor in everything(model).items():
            raw = tensor.data.view(-1).view(torch.uint8)
            for place in {0, len(raw) // 2, len(raw) - 1}:
                raw[place] ^= 1
                changed = key(made, PROMPTS, package)
                raw[place] ^= 1
                assert changed not in keys, (role, name, place)
                keys.add(changed)
    assert None not in keys
    assert len(keys) > 60
    assert key(made, PROMPTS, package) in keys


@pytest.mark.parametrize("size", [(1 << 24) + 3, 5 * (1 << 24)])
def test_large_weights_are_read_to_their_last_byte(size):
    weight = torch.zeros(size, dtype=torch.uint8)
    found = [fingerprint(weight)]
    for place in (0, size // 2, size - 1):
        weight[place] = 1
        found.append(fingerprint(weight))
        weight[place] = 0
    assert len(set(found)) == 4
    assert fingerprint(weight) == found[0]


def test_the_same_weights_in_another_order_or_under_other_names_give_another_key():
    a, b = torch.arange(4.0), torch.arange(4.0, 8.0)
    assert fingerprint({"a": a, "b": b}) != fingerprint({"a": b, "b": a})
    assert fingerprint(a.view(2, 2)) != fingerprint(a)
    assert fingerprint(a) != fingerprint(a.view(torch.int32))
    assert fingerprint(a.view(2, 2).T) == fingerprint(a.view(2, 2).T.contiguous())


def test_the_same_pair_has_the_same_key_made_again_and_after_use(package):
    first, second = (with_models(llama(), llama(num_layers=1)) for _ in range(2))
    before = key(first, PROMPTS, package)
    assert before == key(second, PROMPTS, package)
    first.generate([[5, 6, 7], [8]], max_new_tokens=8, sampling=Sampling(temperature=0))
    assert key(first, PROMPTS, package) == before


def test_another_attention_gives_another_key(package):
    made = with_models(llama(), llama(num_layers=1))
    keys = {key(made, PROMPTS, package)}
    for lm in (made.parts.target, made.parts.drafter.lm):
        lm.model.set_attn_implementation("eager")
        keys.add(key(made, PROMPTS, package))
    assert len(keys) == 3


def test_another_setting_gives_another_key(package):
    made = with_models(llama(), llama(num_layers=1))
    parts = made.parts
    others = [
        with_models(llama(), llama(num_layers=1), pad_to=2),
        with_models(llama(), llama(num_layers=1), max_context=100),
        Engine(parts, max_slots=1),
        Engine(parts, max_slots=2, max_prefill_tokens=7),
        Engine(parts, max_slots=2, eos_ids=frozenset({3})),
        Engine(replace(parts, verifier=BlockVerifier()), max_slots=2),
        Engine(replace(parts, length=FixedLength(num_speculative_tokens=4)), max_slots=2),
        Engine(replace(parts, drafter=NgramDrafter()), max_slots=2),
        Engine(replace(parts, drafter=NgramDrafter(prompt_lookup_max=5)), max_slots=2),
    ]
    keys = [key(each, PROMPTS, package) for each in (made, *others)]
    assert None not in keys
    assert len({*keys, key(made, [[1], [2, 4]], package)}) == len(keys) + 1


def test_a_changed_a_new_and_a_moved_file_of_source_give_another_key(package):
    made = engine()
    keys = [key(made, PROMPTS, package)]
    (package / "room" / "two.py").write_text("y = 3\n")
    keys.append(key(made, PROMPTS, package))
    (package / "three.py").write_text("")
    keys.append(key(made, PROMPTS, package))
    (package / "three.py").rename(package / "room" / "three.py")
    keys.append(key(made, PROMPTS, package))
    assert None not in keys
    assert len(set(keys)) == 4


def test_the_key_covers_every_file_of_the_package_itself():
    package = Path(outrider.__file__).parent
    assert package == PACKAGE
    assert {"proof/gate.py", "lm/model.py", "decoding/step.py", "__init__.py"} <= set(source(package))
    assert len(source(package)) == len(list(package.rglob("*.py")))


@pytest.mark.parametrize("library", ["torch", "transformers"])
def test_another_version_gives_another_key(package, monkeypatch, library):
    made, known = engine(), importlib.metadata.version
    before = key(made, PROMPTS, package)
    monkeypatch.setattr("outrider.proof.gate.version", lambda name: "0.0.1" if name == library else known(name))
    assert key(made, PROMPTS, package) not in (before, None)


def test_another_machine_gives_another_key(package, monkeypatch):
    made = engine()
    before = key(made, PROMPTS, package)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "ANOTHER")
    assert key(made, PROMPTS, package) not in (before, None)


def test_the_instruction_sets_are_those_that_linux_names(tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nflags : fpu avx2\n\nprocessor : 1\nflags : fpu avx2\nbogomips : 1.5\n")
    assert instruction_sets(info) == {"flags : fpu avx2"}
    assert instruction_sets(tmp_path / "nothing") == set()
    assert fingerprint(machine(torch.device("cpu"))) is not None


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_quantised_weights_are_read_too():
    models = [
        torch.ao.quantization.quantize_dynamic(nn.Sequential(linear), {nn.Linear})
        for linear in (nn.Linear(4, 3), nn.Linear(4, 3))
    ]
    keys = [fingerprint(each) for each in models]
    assert None not in keys
    assert len(set(keys)) == 2


def test_a_draft_model_with_another_vocabulary_is_read_and_so_is_what_the_vocabularies_share():
    tokenizer = outrider.load(drafter="none").tokenizer
    inner = LanguageModel(llama(num_layers=1), max_slots=2)
    lms = [Translated(inner, translation(tokenizer, tokenizer, size, 50)) for size in (60, 60, 61)]
    before = [fingerprint(lm) for lm in lms]
    assert None not in before
    assert before[0] == before[1] != before[2]
    assert lms[0].translation.pieces(55)
    assert fingerprint(lms[0]) == before[0]
    inner.model.lm_head.weight.data[0, 0] += 1
    assert fingerprint(lms[0]) != before[0]


def test_what_cannot_be_read_is_not_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    parts = engine().parts
    tables = replace(
        parts,
        target=TabularLM(random_rows(5, seed=0), 5, max_context=200),
        drafter=ModelDrafter(lm=TabularLM(random_rows(5, seed=1), 5)),
    )
    made = Engine(tables, max_slots=2)
    assert key(made, PROMPTS) is None
    assert gate(made).fault is None
    assert not list(tmp_path.rglob("*.json"))


def test_the_gate_looks_again_after_a_weight_has_changed_and_only_then(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    made = with_models(llama(), llama(num_layers=1))
    target = made.parts.target

    def forwards() -> int:
        before = target.num_forwards
        assert gate(made).fault is None
        return target.num_forwards - before

    assert forwards() > 0
    assert forwards() == 0
    made.parts.drafter.lm.model.lm_head.weight.data[0, 0] += 1
    assert forwards() > 0
    assert len(list(tmp_path.rglob("*.json"))) == 2


def test_the_gate_keeps_nothing_where_nothing_is_to_be_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", "/dev/null")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert gate(with_models(llama(), llama(num_layers=1))).fault is None
    assert list(tmp_path.iterdir()) == []


DIFFERENCE = {"prompt": 0, "position": 0, "plain": 1, "drafted": 2, "gap": 0.5, "span": 1.0}
NONSENSE = [
    {"num_prompts": None},
    {"dice": "likely"},
    {"nodes": {"num_nodes": 3}},
    {"identity": None},
    {"identity": {"num_tokens": 96}},
    {"identity": {"num_tokens": None, "differences": []}},
    {"identity": {"num_tokens": 96, "differences": 3}},
    {"identity": {"num_tokens": 96, "differences": [DIFFERENCE | {"gap": "x"}]}},
]
DAMAGED = ["[" * 100_000, '{"num_tokens": 96, "differences": ' + "[" * 900 + "]" * 900 + "}"]


def test_what_the_gate_kept_and_makes_no_sense_counts_as_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    made = with_models(llama(), llama(num_layers=1))
    found, record = gate(made), {"pair": key(made, openings(made))}
    kept = remembered.read("gate", record)
    assert _read(kept) == found
    assert _read(kept | {"identity": {"num_tokens": 96, "differences": [DIFFERENCE]}}) is not None
    assert [_read(kept | values) for values in NONSENSE] == [None] * len(NONSENSE)
    assert [_read({name: kept[name] for name in kept if name != left_out}) for left_out in kept] == [None] * len(kept)
    [file] = tmp_path.iterdir()
    for values in DAMAGED:
        file.write_text(f'{{"key": {{"pair": "{record["pair"]}"}}, "values": {values}}}')
        assert _read(remembered.read("gate", record)) is None
    assert gate(made).fault is None
    assert remembered.read("gate", record)["identity"] == kept["identity"] == {"num_tokens": 96, "differences": []}
