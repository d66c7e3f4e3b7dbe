"""A run of the tiny learner in a process of its own."""

import os
import signal
import sys
import time
from pathlib import Path
from threading import Thread

from outrider.training.loop.settings import TrainSettings
from outrider.training.loop.steps import Progress, train
from outrider.training.loop.watch import Evaluation
from tests.training.learners import Bigram, batches, documents


def main(out: str, steps: str, save_every: str, seconds: str = "0", dropout: str = "0.5") -> None:
    """Train, and be killed some seconds after the first step."""
    settings = TrainSettings(
        steps=int(steps),
        batch_size=4,
        max_length=16,
        learning_rate=0.03,
        warmup=3,
        save_every=int(save_every),
        watch_every=int(save_every),
        log_every=1,
        device="cpu",
    )

    def killed() -> None:
        time.sleep(float(seconds))
        os.kill(os.getpid(), signal.SIGKILL)

    watches: list[Thread] = []

    def begin(_: Progress) -> None:
        if float(seconds) and not watches:
            watches.append(Thread(target=killed, daemon=True))
            watches[0].start()

    watch = Evaluation(documents(4, seed=9), depth=2)
    train(Bigram(dropout=float(dropout)), batches(), settings, Path(out), watch, begin)


if __name__ == "__main__":
    main(*sys.argv[1:])
