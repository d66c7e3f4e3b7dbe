"""Short runs of learners of every kind, one after another, in one process or in one of several."""

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


def learner(name: str) -> Learner:
    """A learner whose losses have no random part."""
    target = tiny("llama").float().requires_grad_(False)
    if name == "model":
        return Distilled(tiny("llama", seed=1).float(), target, loss=divergence("fkl"))
    return head_learner(name, target, loss="fkl", depth=2)


def main(out: str) -> None:
    """Train all of them."""
    for name in NAMES:
        batches = Batches(documents(), batch_size=4, max_length=24, seed=0)
        train(learner(name), batches, SETTINGS, Path(out) / name, Evaluation(documents(), depth=2))
