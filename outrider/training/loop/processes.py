"""The processes of a run, as `accelerate launch` started them."""

import atexit
import functools
import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, parse_flag_from_env
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.export import register_dataclass

from outrider.core.inputs import InputError
from outrider.learning.learner import Loss

DIVIDING = "to_sharded_hook"


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


@functools.cache
def leave_at_exit() -> None:
    """Let this process leave the group before the interpreter ends: a thread of gloo that drops its last tensor later
    aborts the process.
    """
    atexit.register(_leave)


def _leave() -> None:
    # With NCCL a process that failed would wait here for the others.
    if distributed.is_initialized() and distributed.get_backend() == "gloo":
        distributed.destroy_process_group()


def num_shards() -> int:
    """Over how many processes the weights are divided; 1 if each has all of them."""
    return count() if parse_flag_from_env("ACCELERATE_USE_FSDP") else 1


def divide(accelerator: Accelerator) -> None:
    """Let FSDP divide the weights of a learner among processes, on CPUs too, if it was asked for.

    FSDP2 takes the learner as one part, unless classes of layers are named: heads read weights of their parts without
    calling these, and a part that is divided by itself is whole in its own call alone.

    Raises:
        InputError: Weights are to be divided on CPUs by FSDP1.
    """
    state = accelerator.state
    if state.distributed_type == DistributedType.MULTI_CPU and parse_flag_from_env("ACCELERATE_USE_FSDP"):
        # Otherwise accelerate keeps copies there.
        plugin = FullyShardedDataParallelPlugin()
        if plugin.fsdp_version != 2:
            raise InputError("on CPUs weights are divided by FSDP2 alone; start with --fsdp_version 2")
        state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin
    if accelerator.is_fsdp2:
        _show_losses()
        plugin = state.fsdp_plugin
        if plugin.auto_wrap_policy is size_based_auto_wrap_policy:
            plugin.auto_wrap_policy = None
        # Every process has made the whole learner already.
        plugin.cpu_ram_efficient_loading = False


@functools.cache
def _show_losses() -> None:
    """Let FSDP2 see the tensors of a loss: it adds up gradients over processes behind those that it sees.

    In torch 2.11 it does not look into dataclasses: each process would keep its own gradients, without a word.
    """
    register_dataclass(Loss)


def load_whole() -> None:
    """Let every process read whole models. `accelerate launch` tells transformers to read them in the first one alone,
    and a target, which is not divided, would be empty in the others.
    """
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"


def is_divided(model: nn.Module) -> bool:
    """Whether the weights of a prepared learner are divided among processes."""
    return isinstance(model, FullyShardedDataParallel) or any(isinstance(each, FSDPModule) for each in model.modules())


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
        with _kept_whole(model if divided else nn.Module()):
            yield
    finally:
        for each in divided:
            each.reshard()


@contextmanager
def _kept_whole(model: nn.Module) -> Iterator[None]:
    """Within it, FSDP2 does not divide weights again when they are read by `state_dict`, as it does to save them.

    Relied on in torch (read and run in 2.13): a hook named `to_sharded_hook` does that.
    """
    hooks = {module: module._state_dict_pre_hooks for module in model.modules()}
    for module, module_hooks in hooks.items():
        others = (
            (key, hook) for key, hook in module_hooks.items() if DIVIDING not in getattr(hook, "__qualname__", "")
        )
        module._state_dict_pre_hooks = OrderedDict(others)
    try:
        yield
    finally:
        for module, module_hooks in hooks.items():
            module._state_dict_pre_hooks = module_hooks
