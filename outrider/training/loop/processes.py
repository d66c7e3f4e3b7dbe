"""The processes of a run, as `accelerate launch` started them."""

from collections.abc import Iterator
from contextlib import contextmanager

from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel


def count() -> int:
    """How many there are."""
    return int(PartialState().num_processes)


def is_first() -> bool:
    """Whether this is the first of all."""
    return bool(PartialState().is_main_process)


def is_first_of_machine() -> bool:
    """Whether this is the first one on its machine."""
    return bool(PartialState().is_local_main_process)


def wait() -> None:
    """Wait until all processes are here."""
    PartialState().wait_for_everyone()


def num_shards() -> int:
    """Over how many processes the weights are divided; 1 if each has all of them."""
    return count() if parse_flag_from_env("ACCELERATE_USE_FSDP") else 1


@contextmanager
def whole(model: nn.Module) -> Iterator[None]:
    """Within it, every process has all weights of a model in place."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            yield
        return
    divided = [each for each in model.modules() if isinstance(each, FSDPModule)]
    for each in divided:
        each.unshard()
    try:
        yield
    finally:
        for each in divided:
            each.reshard()
