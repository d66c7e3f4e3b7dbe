"""The processes that a launcher such as `torchrun` started together, told without torch."""

import os


def launched() -> int:
    """How many processes `torchrun` started; 1 where it did not."""
    return int(os.environ.get("WORLD_SIZE") or 1) if "LOCAL_RANK" in os.environ else 1


def launched_first() -> bool:
    """Whether this is the first process of those that were started together. Needs no group of processes."""
    return launched() == 1 or int(os.environ.get("RANK") or 0) == 0
