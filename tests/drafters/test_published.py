"""What is published beside a target drafts what transformers drafts with it, and changes no output."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, MiMoV2FlashConfig, PreTrainedModel
from transformers.generation.candidate_generator import (
    DFlashTokenCandidateGenerator,
    MTPCandidateGenerator,
    SinglePositionMultiTokenCandidateGenerator,
)

import outrider
from outrider import catalog
from outrider.core.types import InputError, Sampling
from outrider.drafters.protocol import Drafter
from outrider.engine.engine import Engine
from outrider.heads.assistant import AssistantDrafter
from outrider.heads.mtp import MtpDrafter, MtpLayersDrafter, MtpPath
from outrider.heads.trunks.blocks import BlockDrafter
from outrider.lm.hf.assistant import open_assistant
from outrider.lm.hf.mtp import behind_pattern, load_mtp
from outrider.lm.hf.open import open_model
from outrider.lm.model import LanguageModel
from outrider.lm.target_info import TargetInfo
from recipes.published_pairs import BESIDE, Size, gemma4, mtp_target, muse_glimmer
from tests.world.models import llama
from tests.world.parts import parts_of
from tests.world.published import needs_mtp

pytestmark = pytest.mark.usefixtures("float64_stays_float64")

Drafts = dict[tuple[int, ...], list[int]]
GREEDY = Sampling(temperature=0.0, seed=0)
PROMPT = [5, 9, 33, 7, 12, 40, 3, 22, 51, 6, 17]
CELLS = (("chain", "block"), ("gumbel:branching=2x2x1", "traversal"), ("dynamic:width=3,num_nodes=8", "match"))


def engine(
    model: PreTrainedModel,
    drafter: Callable[[TargetInfo], Drafter],
    *,
    gamma: int = 3,
    tree: str = "chain",
    verifier: str = "block",
) -> Engine:
    lm = LanguageModel(model, max_slots=4, max_context=256)
    parts = parts_of(lm, drafter(TargetInfo.of(lm, None)), tree=tree, verifier=verifier, length=gamma)
    return Engine(parts, max_slots=4)


def ours(busy: Engine, prompt: Sequence[int], tokens: int) -> tuple[list[int], Drafts]:
    """Output tokens, and what was drafted behind each text; some of it was accepted and some was not."""
    drafts: Drafts = {}

    def watch(cycle) -> None:
        for i, state in enumerate(cycle.states):
            first, end = int(cycle.draft.offsets[i]), int(cycle.draft.offsets[i + 1])
            drafts[tuple(state.tokens)] = cycle.draft.tokens[first + 1 : end].tolist()

    busy.watch = watch
    [out] = busy.generate([list(prompt)], max_new_tokens=tokens, sampling=GREEDY)
    assert 0 < out.num_accepted_tokens < out.num_draft_tokens
    return out.tokens, {text: drafted for text, drafted in drafts.items() if drafted}


@contextmanager
def recorded(kind: type) -> Iterator[Drafts]:
    """What a candidate generator of transformers drafts behind each text."""
    original, drafts = kind.get_candidates, {}

    def get_candidates(self, input_ids, *args, **named):
        candidates, logits = original(self, input_ids, *args, **named)
        if candidates.shape[1] > input_ids.shape[1]:
            drafts[tuple(input_ids[0].tolist())] = candidates[0, input_ids.shape[1] :].tolist()
        return candidates, logits

    kind.get_candidates = get_candidates
    try:
        yield drafts
    finally:
        kind.get_candidates = original


def theirs(model: PreTrainedModel, tokens: int, **named: object) -> list[int]:
    made = model.generate(torch.tensor([PROMPT]), max_new_tokens=tokens, do_sample=False, **named)
    return made[0, len(PROMPT) :].tolist()


def assert_same(one: Drafts, other: Drafts) -> None:
    """Behind the texts that both drafted behind, of which there are some, both drafted the same."""
    shared = [text for text in one if text in other]
    assert len(shared) > 3
    for text in shared:
        count = min(len(one[text]), len(other[text]))
        assert one[text][:count] == other[text][:count], text


MTP = [("glm4_moe", 1), ("glm4_moe", 3), ("deepseek_v3", 1), ("mellum", 1)]


@pytest.fixture(scope="module")
def mtp_targets(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    needs_mtp()
    made: dict[tuple[str, int], Path] = {}

    def target(family: str, layers: int) -> Path:
        if (family, layers) not in made:
            folder = tmp_path_factory.mktemp(f"{family}-{layers}")
            size = Size(strength=0.3 if family in ("glm4_moe", "deepseek_v3") else 0.5)
            made[family, layers] = mtp_target(family, size, folder, num_mtp_layers=layers)
        return made[family, layers]

    return target


def opened(place: Path) -> PreTrainedModel:
    # Only eager experts compute in float64.
    return AutoModelForCausalLM.from_pretrained(place, dtype=torch.float64, experts_implementation="eager").eval()


@pytest.mark.parametrize(("family", "layers"), MTP)
def test_mtp_drafts_what_transformers_drafts(mtp_targets, family, layers):
    model = opened(mtp_targets(family, layers))
    busy = engine(model, MtpPath().bind, gamma=layers)
    assert type(busy.parts.drafter) is (MtpDrafter if layers == 1 else MtpLayersDrafter)
    made, drafts = ours(busy, PROMPT, 40)
    assert made == busy.plain().generate([PROMPT], max_new_tokens=40, sampling=GREEDY)[0].tokens
    model._keys_to_ignore_on_load_unexpected = {*model._keys_to_ignore_on_load_unexpected, behind_pattern(model)}
    with recorded(MTPCandidateGenerator) as others:
        assert theirs(model, 40, use_mtp=True) == made
    assert_same(drafts, others)


@pytest.mark.parametrize(("tree", "verifier"), CELLS)
@pytest.mark.parametrize(("family", "layers"), [("glm4_moe", 3), ("mellum", 1)])
def test_mtp_beyond_its_layers_and_in_trees_changes_no_output(mtp_targets, family, layers, tree, verifier):
    busy = engine(opened(mtp_targets(family, layers)), MtpPath().bind, gamma=5, tree=tree, verifier=verifier)
    these = [PROMPT, PROMPT[:1], PROMPT[3:6] * 30]
    drafted = busy.generate(these, max_new_tokens=24, sampling=GREEDY)
    plain = busy.plain().generate(these, max_new_tokens=24, sampling=GREEDY)
    assert [out.tokens for out in drafted] == [out.tokens for out in plain]
    assert sum(out.num_accepted_tokens for out in drafted) > 0


def test_mtp_layers_have_the_type_to_which_their_target_was_cast(mtp_targets):
    model = AutoModelForCausalLM.from_pretrained(mtp_targets("mellum", 1), dtype=torch.float32).double()
    assert {weight.dtype for weight in load_mtp(model).layers.parameters()} == {torch.float64}
    assert model.config.dtype == torch.float32


OF_QWEN = [(family, nested) for family in BESIDE for nested in ((False,) if family == "qwen3_next" else (False, True))]


def with_images(place: Path, folder: Path) -> Path:
    """The same checkpoint as it is published, as a part of a model for images and texts."""
    text = json.loads((place / "config.json").read_text(encoding="utf-8"))
    kind = text["model_type"].removesuffix("_text")
    whole = {"model_type": kind, "text_config": text, "vision_config": {"model_type": kind, "depth": 1}}
    (folder / "config.json").write_text(json.dumps(whole), encoding="utf-8")
    tensors = load_file(place / "model.safetensors")
    inner = {re.sub(r"^model\.", "model.language_model.", name): tensor for name, tensor in tensors.items()}
    save_file(inner, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def stored_mtp(place: Path) -> dict[str, Tensor]:
    """The tensors of the layer, by the names that transformers gives them; experts in one tensor."""
    names = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "post_norm"}
    found, experts = {}, {}
    for name, tensor in load_file(place / "model.safetensors").items():
        if not name.startswith("mtp."):
            continue
        inner = name.removeprefix("mtp.")
        if part := re.fullmatch(r"layers\.0\.mlp\.experts\.(\d+)\.(\w+)\.weight", inner):
            experts[part[2], int(part[1])] = tensor
        elif inner.startswith("layers.0."):
            found[inner.replace("layers.0.", "layers.0.mtp_block.")] = tensor
        else:
            found[f"layers.0.{names[inner.removesuffix('.weight')]}.weight"] = tensor
    if experts:
        numbers = sorted({number for _, number in experts})
        both = [torch.cat([experts["gate_proj", i], experts["up_proj", i]]) for i in numbers]
        found["layers.0.mtp_block.mlp.experts.gate_up_proj"] = torch.stack(both)
        found["layers.0.mtp_block.mlp.experts.down_proj"] = torch.stack([experts["down_proj", i] for i in numbers])
    return found


@pytest.mark.parametrize(("family", "nested"), OF_QWEN, ids=str)
def test_mtp_of_qwen_is_read_bit_for_bit_and_drafts_for_the_text_of_plain_decoding(
    mtp_targets, tmp_path, family, nested
):
    place = mtp_targets(family, 1)
    if nested:
        place = with_images(place, tmp_path)
    model = open_model(str(place), dtype=torch.float64)
    if "moe" in family or family == "qwen3_next":
        # Only eager experts compute in float64.
        model.set_experts_implementation("eager")
    before = vars(model.config) | {}
    loaded, stored = load_mtp(model).layers.state_dict(prefix="layers."), stored_mtp(place)
    assert loaded.keys() == stored.keys()
    assert all(torch.equal(loaded[name], tensor.double()) for name, tensor in stored.items())
    assert vars(model.config) == before
    busy = outrider.load(model, drafter="mtp", length="fixed:4", probe=False)
    assert isinstance(busy.parts.drafter, MtpDrafter)
    these = [PROMPT, PROMPT[:1], PROMPT[3:6] * 30, *([7 + i, 3 * i + 1, 40 - i] for i in range(8))]
    drafted = busy.generate(these, max_new_tokens=24, sampling=GREEDY)
    plain = busy.plain().generate(these, max_new_tokens=24, sampling=GREEDY)
    assert [out.tokens for out in drafted] == [out.tokens for out in plain]
    assert 0 < sum(out.num_accepted_tokens for out in drafted) < sum(out.num_draft_tokens for out in drafted)


def test_configs_of_qwen_say_how_many_layers_there_are(mtp_targets):
    model = opened(mtp_targets("qwen3_5", 1))
    model.config.mtp_num_hidden_layers = 0
    with pytest.raises(InputError, match="qwen3_5_text has no multi-token-prediction layers"):
        load_mtp(model)
    model.config.mtp_num_hidden_layers = 2
    with pytest.raises(InputError, match=r"transformers cannot load .*missing"):
        load_mtp(model)
    model.config.mtp_num_hidden_layers, model.config.mtp_use_dedicated_embeddings = 1, True
    with pytest.raises(InputError, match="embeddings of their own"):
        load_mtp(model)
    other = opened(mtp_targets("qwen3_next", 1))
    del other.config.mtp_num_hidden_layers
    assert len(load_mtp(other).layers) == 1


def test_mtp_layers_of_mimo_are_refused_by_name():
    config = MiMoV2FlashConfig(**Size().mixed, **Size().experts)
    with pytest.raises(InputError, match="mimo_v2_flash have a layout of their own, with the hidden state first"):
        load_mtp(AutoModelForCausalLM.from_config(config))


def test_a_transformers_that_is_too_old_is_told(monkeypatch):
    model = llama()
    model.config.num_mtp_layers = 1
    monkeypatch.setattr("outrider.lm.hf.mtp.SINCE", Version("99"))
    with pytest.raises(InputError, match="mtp needs transformers 99 or later, and 5"):
        load_mtp(model)


def test_mtp_is_refused_where_there_is_none(mtp_targets, tmp_path):
    around = TargetInfo.of(LanguageModel(llama(), max_slots=1), None)
    with pytest.raises(InputError, match="llama has no multi-token-prediction layers"):
        MtpPath().bind(around)
    model = opened(mtp_targets("glm4_moe", 1))
    around = TargetInfo.of(LanguageModel(model, max_slots=1), None)
    with pytest.raises(InputError, match="transformers cannot load the multi-token-prediction layers of glm4_moe"):
        MtpPath(path=str(tmp_path)).bind(around)
    before = model.config.name_or_path
    assert before
    model.config.num_mtp_layers = 2
    with pytest.raises(InputError, match="missing"):
        MtpPath().bind(around)
    assert model.config.name_or_path == before
    model.config.num_mtp_layers, model.config.name_or_path = 1, ""
    with pytest.raises(InputError, match="say where its layers are: mtp:path="):
        MtpPath().bind(around)
    assert isinstance(MtpPath(path=str(mtp_targets("glm4_moe", 1))).bind(around), MtpDrafter)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return gemma4(Size(strength=0.5), tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def ordered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An assistant that looks at the tokens of its best clusters only."""
    return gemma4(Size(), tmp_path_factory.mktemp("ordered"), ordered=True)


def assistant_at(place: Path) -> PreTrainedModel:
    return open_assistant(str(place), dtype=torch.float64, device=torch.device("cpu"))


def naive(target: PreTrainedModel, assistant: PreTrainedModel, text: Sequence[int], count: int) -> list[int]:
    """What an assistant drafts behind a text: a plain forward over it, and only its keys and values."""
    output = target(torch.tensor([text[:-1]]), use_cache=False, output_hidden_states=True, return_shared_kv_states=True)
    state, token, drafted = output.hidden_states[-1][:, -1:], torch.tensor([[text[-1]]]), []
    for _ in range(count):
        embedded = target.get_input_embeddings()(token)
        step = assistant(
            inputs_embeds=torch.cat([embedded, state], -1),
            position_ids=torch.tensor([[len(text) - 1]]),
            shared_kv_states=output.shared_kv_states,
        )
        token, state = step.logits.argmax(-1), step.last_hidden_state
        drafted.append(int(token))
    return drafted


@pytest.mark.parametrize("kind", ["gemma", "ordered"])
def test_an_assistant_drafts_what_it_drafts_from_a_plain_forward(kind, request):
    places = request.getfixturevalue(kind)
    target, assistant = opened(places[0]), assistant_at(places[1])
    busy = engine(target, catalog.make("drafter", str(places[1])).bind)
    assert isinstance(busy.parts.drafter, AssistantDrafter)
    made, drafts = ours(busy, PROMPT, 40)
    assert made == busy.plain().generate([PROMPT], max_new_tokens=40, sampling=GREEDY)[0].tokens
    with torch.no_grad():
        assert_same(drafts, {text: naive(target, assistant, text, 3) for text in drafts})


def test_transformers_says_the_same_with_an_assistant_and_drafts_the_same_after_a_prompt(gemma):
    target, assistant = opened(gemma[0]), assistant_at(gemma[1])
    made, drafts = ours(engine(target, catalog.make("drafter", str(gemma[1])).bind), PROMPT, 24)
    with recorded(SinglePositionMultiTokenCandidateGenerator) as others:
        assert theirs(target, 24, assistant_model=assistant) == made
    # Later it sees the key of a rejected token, which ours does not.
    first = min(others, key=len)
    assert drafts[first] == others[first][: len(drafts[first])]


@pytest.mark.parametrize(("tree", "verifier"), CELLS)
def test_an_assistant_in_batches_and_trees_changes_no_output(gemma, tree, verifier):
    busy = engine(opened(gemma[0]), catalog.make("drafter", str(gemma[1])).bind, tree=tree, verifier=verifier)
    these = [PROMPT, PROMPT[:1], PROMPT[3:6] * 30]
    drafted = busy.generate(these, max_new_tokens=24, sampling=GREEDY)
    plain = busy.plain().generate(these, max_new_tokens=24, sampling=GREEDY)
    assert [out.tokens for out in drafted] == [out.tokens for out in plain]
    assert sum(out.num_accepted_tokens for out in drafted) > 0


def test_an_assistant_in_a_batch_drafts_what_it_drafts_alone(ordered):
    sampling = Sampling(temperature=0.9, seed=3)
    these = [PROMPT, PROMPT[:2], PROMPT[3:6] * 30]
    busy = engine(opened(ordered[0]), catalog.make("drafter", str(ordered[1])).bind)
    together = busy.generate(these, max_new_tokens=16, sampling=sampling)
    for prompt, batched in zip(these, together, strict=True):
        [alone] = engine(opened(ordered[0]), lambda around: busy.parts.drafter.cast(around)).generate(
            [prompt], max_new_tokens=16, sampling=sampling
        )
        assert (alone.tokens, alone.num_accepted_tokens) == (batched.tokens, batched.num_accepted_tokens)


def test_an_assistant_of_another_target_is_refused(gemma, tmp_path):
    other = LanguageModel(llama(), max_slots=1)
    with pytest.raises(InputError, match="keys and values of a Gemma 4 target"):
        catalog.make("drafter", f"assistant:path={gemma[1]}").bind(TargetInfo.of(other, None))
    wide = opened(gemma4(Size(hidden=64), tmp_path / "wide")[0])
    with pytest.raises(InputError, match="hidden states of width 32, and this target's have width 64"):
        catalog.make("drafter", str(gemma[1])).bind(TargetInfo.of(LanguageModel(wide, max_slots=1), None))
    many = opened(gemma4(Size(vocab=96), tmp_path / "many")[0])
    with pytest.raises(InputError, match="knows 64 tokens, and this target has 96"):
        catalog.make("drafter", str(gemma[1])).bind(TargetInfo.of(LanguageModel(many, max_slots=1), None))


def test_the_assistant_of_muse_glimmer_drafts_what_transformers_drafts(tmp_path):
    size = Size(window=128)
    target, place = muse_glimmer(size, tmp_path)
    target = target.double()
    busy = engine(target, catalog.make("drafter", str(place)).bind)
    assert isinstance(busy.parts.drafter, BlockDrafter)
    made, drafts = ours(busy, PROMPT, 30)
    assert made == busy.plain().generate([PROMPT], max_new_tokens=30, sampling=GREEDY)[0].tokens
    assistant = AutoModel.from_pretrained(place, dtype=torch.float64)
    with recorded(DFlashTokenCandidateGenerator) as others:
        assert theirs(target, 30, assistant_model=assistant, speculation_type="dflash") == made
    assert_same(drafts, others)
