"""PosS, GRIFFIN and Jakiro: published forms against a naive reading of them, and what makes them their parents."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider import catalog
from outrider.core.types import Draft, InputError, Sampling
from outrider.decoding.protocol import Parts
from outrider.decoding.step import StepDecoding
from outrider.drafters.protocol import Drafter
from outrider.engine.engine import Engine
from outrider.heads.griffin import SPEC as GRIFFIN
from outrider.heads.jakiro import SPEC as JAKIRO
from outrider.heads.poss import SPEC as POSS
from outrider.heads.poss import PossDrafter
from outrider.lengths.fixed import FixedLength
from outrider.lm.hf.taps import tapped
from outrider.lm.protocol import Segment
from outrider.lm.slots.head_inputs import HeadInputs
from outrider.lm.target_info import TargetInfo
from tests.heads.naive_kin import NaiveGriffin, NaiveJakiro, NaivePoss
from tests.world.forced import forced_guesses
from tests.world.models import llama, target
from tests.world.published import eagle, eagle3, layer_of
from tests.world.published_eagle_variants import griffin, jakiro, poss
from tests.world.zoo import VOCAB

pytestmark = pytest.mark.usefixtures("float64_stays_float64")
GREEDY = Sampling(temperature=0.0, seed=0)


def around() -> TargetInfo:
    return TargetInfo.of(target(1), None)


def text(size: int = 15) -> list[int]:
    return np.random.default_rng(0).integers(3, VOCAB, size=size).tolist()


def check(drafter: Drafter, naive: Any, taps: Sequence[int], depth: int = 4) -> None:
    """Every guess of real drafting along a text is what the naive reading says. Rotary tables are in float32."""
    lm, tokens = target(1), text()
    guesses = forced_guesses(drafter, lm, tokens, 5, depth)
    model = llama()
    with torch.no_grad(), tapped(model.model.layers, tuple(taps)) as seen:
        model(torch.tensor([tokens]), use_cache=False)
    known = naive.feature(torch.cat([seen[tap][0] for tap in taps], -1))
    for anchor in range(4, len(tokens) - depth):
        features = known[:anchor]
        for number in range(depth):
            read = torch.tensor(tokens[1 : anchor + 1 + number])
            expected, feature = naive.step(read, features, number, depth)
            logits, expected = guesses[anchor + 1 + number, number].log_softmax(-1), expected.log_softmax(-1)
            assert torch.allclose(logits, expected, atol=1e-5), (anchor, number, (logits - expected).abs().max())
            features = torch.cat([features, feature])


def bound(spec: str) -> Drafter:
    return catalog.make("drafter", spec).bind(around())


@pytest.mark.parametrize("ours", [True, False])
@torch.no_grad()
def test_a_griffin_is_recognised_and_guesses_what_its_description_says(tmp_path, ours):
    tensors = griffin(tmp_path, around(), ours=ours)
    assert catalog.make("drafter", str(tmp_path)) == GRIFFIN.at(path=str(tmp_path))
    check(bound(str(tmp_path)), NaiveGriffin(tensors, layer_of(around()), around().embedding_and_head()), (2,))


@pytest.mark.parametrize("mixture", ["features", "gate", "half"])
@pytest.mark.parametrize("ours", [True, False])
@torch.no_grad()
def test_a_jakiro_is_recognised_and_guesses_what_its_description_says(tmp_path, ours, mixture):
    tensors = jakiro(tmp_path, around(), ours=ours, mixture=mixture)
    assert catalog.make("drafter", str(tmp_path)) == JAKIRO.at(path=str(tmp_path))
    spec = str(tmp_path) if ours else f"jakiro:path={tmp_path},mixture={mixture}"
    check(bound(spec), NaiveJakiro(tensors, layer_of(around()), around().embedding_and_head(), mixture), (2,))


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("count", "steps"), [(3, 1), (2, 2), (1, 1)])
@torch.no_grad()
def test_specialists_are_recognised_and_guess_what_their_description_says(tmp_path, ours, fused, count, steps):
    tensors = poss(tmp_path, around(), ours=ours, fused=fused, count=count, steps=steps)
    if ours or count > 1:
        assert catalog.make("drafter", str(tmp_path)) == POSS.at(path=str(tmp_path))
    spec = f"poss:path={tmp_path}" + ("" if ours else f",stride={steps}") + (",taps=0x1x2" if fused else "")
    naive = NaivePoss(tensors, layer_of(around()), around().embedding_and_head(), count, steps)
    check(bound(spec), naive, (0, 1, 2) if fused else (2,))


def changed(folder: Path, **others: torch.Tensor) -> None:
    """Replace tensors of a checkpoint."""
    file = folder / "model.safetensors"
    save_file(load_file(file) | {name: tensor.clone().contiguous() for name, tensor in others.items()}, file)


def engine(drafter: Drafter, tree: str = "dynamic:width=3,num_nodes=9", depth: int = 4) -> Engine:
    parts = Parts(
        target=target(3),
        drafter=drafter,
        tree=catalog.make("tree", tree),
        verifier=catalog.make("verifier", "match"),
        length=FixedLength(num_speculative_tokens=depth),
        decoding=StepDecoding(),
    )
    return Engine(parts, max_slots=3)


def drafted(busy: Engine) -> list[Draft]:
    """All drafts of a batch of requests."""
    seen: list[Draft] = []
    busy.watch = lambda cycle: seen.append(cycle.draft)
    busy.generate([text(size) for size in (3, 9, 6)], max_new_tokens=9, sampling=GREEDY)
    return seen


def assert_same(one: Drafter, other: Drafter) -> None:
    """Both guess the same along a text, and draft the same trees."""
    guesses, expected = (forced_guesses(each, target(1), text(), 5, 4) for each in (one, other))
    for key, logits in expected.items():
        assert torch.allclose(guesses[key], logits, atol=1e-10), key
    trees = [drafted(engine(each.cast(around4()))) for each in (one, other)]
    assert len(trees[0]) == len(trees[1])
    for mine, theirs in zip(*trees, strict=True):
        assert mine.tokens.tolist() == theirs.tokens.tolist()
        assert mine.parents.tolist() == theirs.parents.tolist()


def around4() -> TargetInfo:
    return TargetInfo.of(target(3), None)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("count", "steps"), [(1, 2), (3, 1), (2, 2)])
def test_equal_specialists_are_their_parent(tmp_path, fused, count, steps):
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    known = around4()
    if fused:
        eagle3(tmp_path / "one", known, few=False)
    else:
        eagle(tmp_path / "one", known, vllm=True)
    parent = catalog.make("drafter", str(tmp_path / "one")).bind(known)
    poss(tmp_path / "many", known, fused=fused, count=count, steps=steps)
    tensors = parent.lm.module.state_dict()
    layers = {
        name.replace("layers.0.", f"layers.{i}."): tensor
        for name, tensor in tensors.items()
        for i in range(count)
        if name.startswith("layers.")
    }
    bias = {} if fused else {"fc.bias": torch.zeros(known.hidden_size)}
    changed(tmp_path / "many", **(tensors | layers | bias))
    many = catalog.make("drafter", f"poss:path={tmp_path / 'many'}" + (",taps=0x1x2" if fused else "")).bind(known)
    assert len(many.lms) == count
    assert_same(many, parent)


def test_what_a_griffin_adds_is_nothing_where_it_is_zero(tmp_path):
    known = around4()
    tensors = griffin(tmp_path, known)
    size, down = known.hidden_size, tensors["layers.0.mlp.down_proj.weight"]
    head = GRIFFIN.at(path=str(tmp_path)).bind(known).module
    states = torch.randn(2, 5, size, dtype=torch.float64)
    with torch.no_grad():
        inputs = inputs_of(torch.zeros(2, 5, dtype=torch.long), states)
        rotary, layer = head.rotary(states, inputs.positions), head.layers[0]
        attended = states + layer.self_attn(states, rotary, inputs)
        layer.mlp.down_proj.weight[size:] = 0
        head_output = layer(states, rotary, inputs)
        assert torch.equal(head.next_feature(head_output), attended)
        assert not torch.allclose(head_output[..., :size], attended)
    # Without what the token adds to the fusion, and with equal halves, it is EAGLE.
    halves = torch.cat([down[:size], down[:size]])
    changed(
        tmp_path,
        **{"fc.mlp.down_proj.weight": torch.zeros(size, 24).double(), "layers.0.mlp.down_proj.weight": halves},
    )
    (tmp_path / "eagle").mkdir()
    eagle(tmp_path / "eagle", known, vllm=True)
    plain = {name.replace("fc.fc.", "fc."): tensor for name, tensor in tensors.items() if ".mlp" not in name[:7]}
    plain = {name: tensor for name, tensor in plain.items() if not name.startswith("fc.post")}
    changed(tmp_path / "eagle", **(plain | {"layers.0.mlp.down_proj.weight": down[:size]}))
    parent = catalog.make("drafter", f"eagle:path={tmp_path / 'eagle'}").bind(known)
    assert_same(GRIFFIN.at(path=str(tmp_path)).bind(known), parent)


class Echo:
    """A cache that keeps nothing."""

    def update(self, keys, values, layer_idx):
        return keys, values


def inputs_of(tokens: torch.Tensor, features: torch.Tensor) -> HeadInputs:
    """What a head reads of causal texts without a past."""
    rows, length = tokens.shape
    positions, mask = torch.arange(length).expand(rows, -1), torch.ones(length, length).tril().bool()
    mask = mask.expand(rows, 1, length, length)
    return HeadInputs(tokens=tokens, features=features, positions=positions, mask=mask, cache=Echo())


def test_equal_experts_are_one_and_their_order_says_nothing(tmp_path):
    known = around()
    tensors = jakiro(tmp_path, known)
    head = JAKIRO.at(path=str(tmp_path)).bind(known).module
    states = torch.randn(2, 5, known.hidden_size, dtype=torch.float64)
    inputs = inputs_of(torch.randint(3, VOCAB, (2, 5)), states)

    def run() -> torch.Tensor:
        with torch.no_grad():
            return head(inputs)

    before, moe = run(), head.layers[0].mlp
    with torch.no_grad():
        swapped = [moe.experts[1], moe.experts[0]]
        moe.experts, moe.gate.weight = torch.nn.ModuleList(swapped), torch.nn.Parameter(moe.gate.weight[[1, 0, 3, 2]])
    after = run()
    assert not torch.allclose(before, after)
    assert torch.allclose(head.next_feature(before), head.next_feature(after), atol=1e-12)
    assert torch.allclose(head.contrast(before), head.contrast(after), atol=1e-12)
    moe.experts = torch.nn.ModuleList([swapped[0], swapped[0]])
    equal = run()
    attended, expert, _, gate = equal.split([known.hidden_size] * 3 + [4], -1)
    assert torch.allclose(head.next_feature(equal), attended + expert)
    shares = gate[..., 2:].softmax(-1).sort(-1).values
    assert torch.allclose(head.contrast(equal), attended + (shares[..., 1:] - shares[..., :1]) * expert)
    # So it is EAGLE with this expert, apart from the last guess of a draft.
    (tmp_path / "eagle").mkdir()
    config = layer_of(known, intermediate_size=12)
    eagle(tmp_path / "eagle", known, vllm=True)
    (tmp_path / "eagle" / "config.json").write_text(json.dumps(config))
    parts = {
        f"layers.0.mlp.{p}_proj.weight": swapped[0].state_dict()[f"{p}_proj.weight"] for p in ("gate", "up", "down")
    }
    plain = {name: tensor for name, tensor in tensors.items() if "mlp_moe" not in name}
    parts = {name: tensor.clone() for name, tensor in parts.items()}
    save_file({**plain, **parts}, tmp_path / "eagle" / "model.safetensors")
    parent = catalog.make("drafter", str(tmp_path / "eagle")).bind(known).module
    with torch.no_grad():
        expected = parent(inputs)
    assert torch.allclose(head.next_feature(equal), expected, atol=1e-10)
    assert torch.allclose(head.logits(equal), parent.logits(expected), atol=1e-10)


@pytest.mark.parametrize("tree", ["chain", "dynamic:width=3,num_nodes=9"])
@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_a_jakiro_drafts_d_levels_in_one_forward_less_and_specialists_in_none_more(tmp_path, tree, depth):
    for name, write in (("jakiro", jakiro), ("poss", poss)):
        (tmp_path / name).mkdir()
        write(tmp_path / name, around4())
        drafter = catalog.make("drafter", f"{name}:path={tmp_path / name}").bind(around4())
        depths = [int(draft.depths.max()) for draft in drafted(engine(drafter, tree, depth))]
        lms = drafter.lms if isinstance(drafter, PossDrafter) else [drafter.lm]
        count = sum(lm.num_forwards for lm in lms)
        if tree == "chain":
            assert count == sum(max(min(d, 1), d - 1) if name == "jakiro" else d for d in depths)
            assert max(depths) == depth
        # Of a tree, the deepest level may be pruned.
        most = depth if name == "poss" else max(1, depth - 1)
        assert count <= most * sum(d > 0 for d in depths)


def test_each_specialist_keeps_what_a_causal_pass_over_the_text_keeps(tmp_path):
    known = around4()
    poss(tmp_path, known)
    drafter = POSS.at(path=str(tmp_path)).bind(known)
    busy, checked, model = engine(drafter), [], llama()

    def compare(cycle: object) -> None:
        for state in cycle.states:
            for number, (lm, feature_state) in enumerate(zip(drafter.lms, state.drafter_state.parts, strict=True)):
                length = lm.length(feature_state.slot)
                if not length:
                    continue
                with torch.no_grad(), tapped(model.model.layers, (2,)) as seen:
                    model(torch.tensor([state.tokens]), use_cache=False)
                features = drafter.features({2: seen[2][0]})[:length]
                fresh = POSS.at(path=str(tmp_path)).bind(known).lms[number]
                slot = fresh.open()
                tokens = torch.tensor(state.tokens[1 : length + 1])
                fresh.extend([Segment(slot=slot, tokens=tokens, features=features)])
                fresh.commit({slot: range(length)})
                mine, theirs = lm.keys_values(feature_state.slot, 0), fresh.keys_values(slot, 0)
                assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(mine, theirs, strict=True))
                checked.append(number)

    busy.watch = compare
    busy.generate([text(7), text(4)], max_new_tokens=8, sampling=GREEDY)
    assert set(checked) == {0, 1, 2}


def test_questions_and_wrong_files_get_one_sentence(tmp_path):
    known = around()
    poss(tmp_path, known, ours=False)
    with pytest.raises(InputError, match="does not say how many draft steps each specialist takes; add stride="):
        bound(str(tmp_path))
    poss(tmp_path, known)
    changed(tmp_path, **{"layers.1.mlp.up_proj.weight": torch.ones(3, 3)})
    with pytest.raises(InputError, match=r"layers\.1\.mlp\.up_proj\.weight is of another shape"):
        bound(f"poss:path={tmp_path}")
    for write, kind in ((griffin, GRIFFIN), (jakiro, JAKIRO), (poss, POSS)):
        folder = tmp_path / kind.name
        folder.mkdir()
        write(folder, known)
        with pytest.raises(InputError, match=f"width {known.hidden_size}, and this target's have width 64"):
            kind.at(path=str(folder)).bind(replace(known, hidden_size=64))
        with pytest.raises(InputError, match="knows 64 tokens, and this target has 99"):
            kind.at(path=str(folder)).bind(replace(known, vocab_size=99))
    with pytest.raises(InputError, match="unknown"):
        bound(f"jakiro:path={tmp_path},mixture=both")
