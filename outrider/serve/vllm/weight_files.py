"""A plugin of vLLM: new weights of a draft model come from a file of safetensors that both processes see.

This file is copied beside vLLM and runs there. It imports vLLM where vLLM calls it, and nothing of Outrider.
"""

from dataclasses import dataclass
from typing import Any

BACKEND = "outrider_files"


def register() -> None:
    """Let vLLM know the backend; vLLM calls this when it starts."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    if BACKEND not in Factory._registry:
        Factory.register_engine(BACKEND, __name__, "engine_class")


def __getattr__(name: str) -> Any:
    """The class of the engine, made when vLLM asks for it: its base is vLLM's."""
    if name != "engine_class":
        raise AttributeError(name)
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )

    @dataclass
    class Begin(WeightTransferInitInfo):  # type: ignore[misc]
        """Nothing has to be agreed on."""

    @dataclass
    class Update(WeightTransferUpdateInfo):  # type: ignore[misc]
        """Where the weights lie.

        Attributes:
            path: A file of safetensors with the names of the drafter's checkpoint.
        """

        path: str

    class WeightFiles(WeightTransferEngine):  # type: ignore[misc]
        """Loads the tensors of a file into the model that vLLM has chosen for the update."""

        init_info_cls, update_info_cls = Begin, Update

        def init_transfer_engine(self, init_info: Begin) -> None:
            """Nothing to do."""

        def start_weight_update(self) -> None:
            """Prepare the layers to be loaded anew."""
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            initialize_layerwise_reload(self.model)

        def finish_weight_update(self) -> None:
            """Put the loaded layers to work."""
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            finalize_layerwise_reload(self.model, self.model_config)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            """Load a file."""
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: Update) -> None:
            """Load all tensors of the file."""
            from safetensors.torch import load_file

            self.model.load_weights(iter(load_file(update_info.path, device=str(self.device)).items()))

        def shutdown(self) -> None:
            """Nothing to end."""

    globals()["engine_class"] = WeightFiles
    return WeightFiles
