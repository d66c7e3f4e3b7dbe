"""Short runs of learners of every kind, one after another, in one process or in one of several."""

import os
from pathlib import Path

from outrider.learning.divergences import divergence
from outrider.learning.learner import Learner
from outrider.training.data.batches import Batches
from outrider.training.distill import Distilled
from outrider.training.loop.settings import TrainSettings
from outrider.training.loop.steps import train
from outrider.training.loop.watch import Evaluation
from tests.world.learners import documents, head_learner
from tests.world.zoo import tiny

HEADS = ("medusa", "eagle3", "parallel", "dflash")
"""A head of each trunk."""
NAMES = (*HEADS, "model")
SETTINGS = TrainSettings(
    steps=3,
    batch_size=4,
    max_length=24,
    learning_rate=3e-3,
    warmup=0,
    watch_every=3,
    save_every=3,
    log_every=1,
    keep_best=False,
    device="cpu",
)
DIVIDED = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP",
    "FSDP_MIN_NUM_PARAMS": "50",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}
"""What `accelerate launch --use_fsdp --fsdp_version 2` tells its processes."""


def learner(name: str) -> Learner:
    """A learner whose losses have no random part."""
    target = tiny("llama").float().requires_grad_(False)
    if name == "model":
        return Distilled(tiny("llama", seed=1).float(), target, loss=divergence("fkl"))
    return head_learner(name, target, loss="fkl", depth=2)


def main(out: str, rank: int = 0, port: int = 0, count: int = 1) -> None:
    """Train all of them. With several processes, this is one of them, and has a part of the weights."""
    if count > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()} | DIVIDED)
    for name in NAMES:
        batches = Batches(documents(), batch_size=4, max_length=24, seed=0)
        train(learner(name), batches, SETTINGS, Path(out) / name, Evaluation(documents(), depth=2))
