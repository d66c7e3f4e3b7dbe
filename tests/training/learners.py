"""A learner small enough for many runs: it guesses the next token from the last one."""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from outrider.learning.batch import Document, TrainBatch
from outrider.learning.learner import JudgedDrafts, Learner, Loss
from outrider.training.data.batches import Batches
from outrider.training.loop.watch import windows

VOCAB = 16


class Bigram(Learner):
    """A table of logits with a hidden layer; half of its states are dropped in training."""

    def __init__(self, seed: int = 0, dropout: float = 0.5) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)
        self.drop = nn.Dropout(dropout)

    def forward(self, batch: TrainBatch) -> Loss:
        logits = self.head(self.drop(self.embed(batch.tokens[:, :-1])))
        losses = F.cross_entropy(logits.transpose(1, 2), batch.tokens[:, 1:], reduction="none")
        learnt = batch.learnt[:, 1:]
        right = (logits.argmax(-1) == batch.tokens[:, 1:]) & learnt
        return Loss(total=losses[learnt].sum(), weight=learnt.sum(), parts={"right": right.sum()})

    def judged(self, batch: TrainBatch, depth: int) -> JudgedDrafts:
        logits = self.head(self.drop(self.embed(batch.tokens[:, :-1]))).log_softmax(-1)
        ratios = logits.gather(-1, batch.tokens[:, 1:, None])[..., 0]
        right = logits.argmax(-1) == batch.tokens[:, 1:]
        return windows(ratios, right, batch.learnt[:, 1:], depth)

    def write(self, folder: Path) -> None:
        save_file(
            {name: tensor.contiguous() for name, tensor in self.state_dict().items()}, folder / "model.safetensors"
        )
        (folder / "config.json").write_text("{}")


def documents(count: int = 12, seed: int = 0) -> list[Document]:
    """Texts of unequal lengths in which each token says much of the next one."""
    dice = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        steps = dice.choice([1, 1, 1, 3], size=dice.integers(6, 20))
        found.append(Document(tokens=np.cumsum(steps) % VOCAB, start=int(dice.integers(0, 4))))
    return found


def batches(batch_size: int = 4, seed: int = 0) -> Batches:
    return Batches(documents(), batch_size=batch_size, max_length=16, seed=seed)
