"""The files of every kind of head are those that were written before: names, order, values, and every byte of a tensor.

After a change that is meant, `python -m tests.heads.test_written` writes them anew.
"""

import hashlib
import json
import re
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, PreTrainedModel

from outrider.heads.head import Head
from outrider.heads.objective import HeadContext, HeadObjective
from outrider.lm.hf.checkpoint import Checkpoint, TargetShape, write_head
from outrider.lm.model import LanguageModel
from outrider.lm.target_info import TargetInfo
from tests.world.block_checkpoints import Checkpoint as BlockCheckpoint
from tests.world.block_checkpoints import checkpoints
from tests.world.heads import CHECKPOINTS, HEADS, TRAINED
from tests.world.learners import documents, head_learner
from tests.world.own_heads import peagle
from tests.world.zoo import VOCAB, tiny

RECORDED = Path(__file__).parent / "written.json"
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "dflare": [{"layers": 2}],
    "dflash": [{"block_size": 4, "layers": 2, "taps": (2, 1)}],
    "dflash2": [{"layers": 2, "conv_kernel_size": 3, "selector_top_k": 5}],
    "domino": [{"shift_label": True, "pure_draft_prefix_len": 0}],
    "dspark": [{"markov": "gated", "confidence": False}, {"markov": "rnn", "markov_rank": 6}],
    "eagle": [{"bias": True}],
    "eagle3": [{"fc_norm": True, "norm_output": True, "norm_before_residual": True}, {"draft_vocab": 7}],
    "jakiro": [{"mixture": "gate", "expert_size": 12}],
    "parallel": [{"form": "medusa", "layers": 2, "slots": 1}],
    "xpress": [{"xpress_rank": 6, "xpress_mlp_ratio": 3}],
    "poss": [{"trunk": "eagle3", "stride": 2, "unrolled": 4}, {"bias": True}],
}
"""Options of heads that change what is written."""


def target() -> PreTrainedModel:
    return tiny("llama").float()


def new(kind: str, options: Mapping[str, Any]) -> HeadObjective:
    return head_learner(kind, target(), documents=documents(), depth=3, **options)


def read(kind: str, write: Callable[[Path, TargetInfo], object]) -> HeadObjective | Head:
    """A head that others have published, as it is read; where such heads are trained, ready to learn."""
    around, spec = TargetInfo.of(LanguageModel(tiny("llama"), max_slots=1), None), HEADS[kind]
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), around)
        head = spec.head.load(Checkpoint(path=folder), around, spec.at(folder))
    return head if spec.objective is None else spec.objective(head, spec.options(), HeadContext(target=target()))


def all_heads() -> dict[str, tuple[str, Callable[[], HeadObjective | Head]]]:
    """All heads by name: their kind, and what makes them."""
    heads: dict[str, tuple[str, Callable[[], HeadObjective | Head]]] = {}
    for kind in TRAINED:
        for options in ({}, *VARIANTS.get(kind, ())):
            name = ",".join([kind, *(f"{key}={value}" for key, value in options.items())])
            heads[name] = kind, partial(new, kind, options)
    others: dict[str, Callable[[Path, TargetInfo], object]] = {**CHECKPOINTS, "parallel-peagle": peagle}
    others |= {f"{name} blocks": partial(save, checkpoint) for name, checkpoint in checkpoints(VOCAB).items()}
    for name, write in others.items():
        kind = re.split("[- ]", name)[0]
        heads[f"read: {name}"] = kind, partial(read, kind, write)
    return heads


def save(checkpoint: BlockCheckpoint, folder: Path, around: TargetInfo) -> None:
    checkpoint.save(folder)


def files(kind: str, writer: HeadObjective | Head) -> dict[str, dict[str, str]]:
    """What is written: as training does, and for each engine."""
    learns = isinstance(writer, HeadObjective)
    head = writer.head if learns else writer
    plain(head)
    shape = TargetShape(num_layers=3, hidden_size=32, vocab_size=VOCAB, taps=tuple(head.reads(3)))
    here = (
        partial(writer.record, torch.float32) if learns else partial(writer.record, shape, torch.float32, "org/target")
    )
    digests = {"here": attempt(here, exact=True)}
    for engine in HEADS[kind].exports.engines:
        if engine != "transformers":
            digests[engine] = attempt(
                lambda engine=engine: head.exported(engine, shape, torch.bfloat16, "org/target"), exact=False
            )
    return digests


def attempt(record: Callable[[], tuple[dict[str, Any], dict[str, torch.Tensor]]], *, exact: bool) -> dict[str, str]:
    """Digests of two files, or why there are none.

    Args:
        exact: Whether the order of keys counts.
    """
    try:
        config, tensors = record()
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    with tempfile.TemporaryDirectory() as folder:
        write_head(Path(folder), config, tensors, torch.float32)
        stated = json.loads((Path(folder) / "config.json").read_text())
        weights = load_file(Path(folder) / "model.safetensors")
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(f"{name} {weights[name].dtype} {list(weights[name].shape)}".encode())
        digest.update(weights[name].contiguous().view(torch.uint8).numpy().tobytes())
    text = json.dumps(without_defaults(stated), sort_keys=not exact)
    return {"config": hashlib.sha256(text.encode()).hexdigest(), "tensors": digest.hexdigest()}


def without_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without what the class of its layers says by itself, which differs with the version of transformers."""
    kept = dict(config)
    for name in ("transformer_layer_config", "layer"):
        if name in kept:
            kept[name] = without_defaults(kept[name])
    if "num_attention_heads" not in kept:
        return kept
    usual = AutoConfig.for_model(kept["model_type"]).to_dict()
    return {key: value for key, value in kept.items() if key == "model_type" or key not in usual or usual[key] != value}


@torch.no_grad()
def plain(head: Head) -> None:
    """Give all weights values that every machine makes alike, and that float32 holds exactly."""
    for name, weight in head.named_parameters():
        # A head within another has the names that it has alone.
        start = crc32(name.removeprefix("first.").encode())
        weight.copy_(((torch.arange(weight.numel()) * 7 + start) % 251 / 64 - 2).view(weight.shape))


@pytest.mark.parametrize("name", list(all_heads()))
def test_a_head_is_written_as_before(name):
    kind, make = all_heads()[name]
    assert files(kind, make()) == json.loads(RECORDED.read_text())[name]


def record() -> None:
    """Write the digests of today's files."""
    torch.set_num_threads(1)
    digests = {name: files(kind, make()) for name, (kind, make) in all_heads().items()}
    lines = [f"{json.dumps(name)}: {json.dumps(each)}" for name, each in digests.items()]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    record()
