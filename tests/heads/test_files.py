"""The files of heads: one or several with an index, whole or damaged."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import save_torch_state_dict

from outrider import catalog
from outrider.core.types import InputError
from outrider.heads.medusa import SPEC as MEDUSA
from outrider.lm.hf.checkpoint import INDICES, READ, read_names, read_tensors
from outrider.lm.target_info import TargetInfo
from tests.world.heads import HEADS, write_head
from tests.world.models import target
from tests.world.published import drawn, medusa_of_its_authors, written

pytestmark = pytest.mark.usefixtures("float64_stays_float64")


def split(folder: Path, *, safe: bool = True) -> Path:
    """Distribute a checkpoint's tensors over several files. Returns the index."""
    [whole] = [file for file in folder.iterdir() if file.name in READ]
    tensors = read_tensors(str(folder))
    whole.unlink()
    save_torch_state_dict(tensors, folder, max_shard_size=4000, safe_serialization=safe)
    return folder / INDICES[0 if safe else 1]


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "pickled"])
@pytest.mark.parametrize("kind", HEADS)
def test_a_head_in_several_files_is_the_head_in_one(tmp_path, kind, safe):
    around = TargetInfo.of(target(1), None)
    write_head(kind, tmp_path, around)
    path = catalog.make("drafter", f"{kind}:path={tmp_path}")
    whole, names = path.bind(around), read_names(str(tmp_path))
    index = split(tmp_path, safe=safe)
    assert len(set(json.loads(index.read_text())["weight_map"].values())) > 2
    assert read_names(str(tmp_path)) == names
    assert catalog.name_of(catalog.make("drafter", str(tmp_path))) == kind
    again = path.bind(around).modules
    assert again.keys() == whole.modules.keys()
    for name, module in whole.modules.items():
        weights, others = module.state_dict(), again[name].state_dict()
        assert weights.keys() == others.keys()
        assert all(torch.equal(weight, others[name]) for name, weight in weights.items())


def test_of_a_model_with_heads_only_the_files_of_heads_are_read(tmp_path):
    around = TargetInfo.of(target(1), None)
    heads = medusa_of_its_authors(tmp_path, around, prefix="medusa_head.")
    alone = MEDUSA.at(str(tmp_path)).bind(around).head.state_dict()
    (tmp_path / "medusa_lm_head.pt").unlink()
    model = drawn({f"model.layers.{i}.mlp.up_proj.weight": (20, 30) for i in range(5)})
    config = json.loads((tmp_path / "config.json").read_text())
    written(tmp_path, config, model | heads, "model.safetensors")
    places = json.loads(split(tmp_path).read_text())["weight_map"]
    unneeded = set(places.values()) - {file for name, file in places.items() if name in heads}
    assert unneeded
    for file in unneeded:
        (tmp_path / file).unlink()
    together = MEDUSA.at(str(tmp_path)).bind(around).head.state_dict()
    assert all(torch.equal(weight, together[name]) for name, weight in alone.items())


def test_damaged_indices_and_missing_files_get_one_sentence(tmp_path):
    around = TargetInfo.of(target(1), None)
    write_head("medusa", tmp_path, around)
    index = split(tmp_path)
    whole = index.read_text()
    places = json.loads(whole)["weight_map"]
    first = sorted(places.values())[0]
    for text, message in (
        ("{", "cannot be read"),
        ("[]", "must be a JSON object"),
        ("{}", "must have a weight_map"),
        (json.dumps({"weight_map": {"a": 1}}), "must have a weight_map"),
        (json.dumps({"weight_map": dict.fromkeys(places, "../secret.safetensors")}), "which is not beside it"),
    ):
        index.write_text(text)
        with pytest.raises(InputError, match=message):
            read_tensors(str(tmp_path))
    index.write_text(whole)
    kept = (tmp_path / first).read_bytes()
    (tmp_path / first).write_bytes(kept[:20])
    with pytest.raises(InputError, match=f"{first} of .* cannot be read"):
        read_tensors(str(tmp_path))
    (tmp_path / first).unlink()
    with pytest.raises(InputError, match=f"{first} of .* is missing, and the index"):
        MEDUSA.at(str(tmp_path)).bind(around)
    index.unlink()
    with pytest.raises(InputError, match="no weights of a head"):
        read_tensors(str(tmp_path))
