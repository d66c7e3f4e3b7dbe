"""A copy of a model that shares its weights, so that what is done to its modules is not done to the model."""

import copy
from typing import Any, TypeVar

from torch import nn

Module = TypeVar("Module", bound=nn.Module)


def twin(model: Module) -> Module:
    """A copy with modules and a config of its own, and the model's own parameters and buffers."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    return copy.deepcopy(model, shared)
