"""What the process has imported from which others are forked; see `forked`."""

import torch

import tests.training.several
import tests.world.models  # noqa: F401

torch.set_num_threads(1)
