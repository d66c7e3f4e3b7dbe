"""A copy of a model that shares its weights, so that what is done to its modules is not done to the model."""

import copy
from typing import Any

from transformers import PreTrainedModel


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with modules and a config of its own, and the model's own parameters and buffers."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    made: PreTrainedModel = copy.deepcopy(model, shared)
    return made
