"""New weights for vLLM's drafter while it serves, by its own routes: pause, update, resume."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from outrider.core.inputs import InputError
from outrider.serve.client.remote import Remote, RemoteError
from outrider.serve.vllm.error_line import shortened

MISSING = (404, 405)


class WeightRoutes:
    """vLLM's routes for weights. They are there where vLLM was started with `VLLM_SERVER_DEV_MODE=1` and a
    `--weight-transfer-config`; `outrider serve --engine vllm --weight-updates` does so.

    Args:
        remote: The server.
    """

    def __init__(self, remote: Remote) -> None:
        self._remote, self._begun = remote, False

    def renew(self, weights: Path, version: str | None = None) -> None:
        """Give the drafter new weights. Requests that run end first; new ones wait meanwhile.

        Keys and values of the old drafter stay in the cache: for a while they cost acceptance, never exactness.

        Args:
            weights: A file of safetensors that vLLM's process can read, with the names of the drafter's checkpoint.
            version: What vLLM calls the weights from now on.

        Raises:
            InputError: The server has no such routes, or the weights do not fit. Requests go on with the old weights,
                or with half of the new ones where vLLM failed between layers; the message says which step failed.
        """
        self._post("/pause?mode=wait", {})
        try:
            if not self._begun:
                self._post("/init_weight_transfer_engine", {"init_info": {}})
                self._begun = True
            self._post("/start_draft_weight_update", {})
            try:
                self._post("/update_weights", {"update_info": {"path": str(weights.absolute())}})
            except InputError:
                # Without an end, no later update could begin.
                with suppress(InputError):
                    self._post("/finish_weight_update", {})
                raise
            self._post("/finish_weight_update", {} if version is None else {"weight_version": version})
        finally:
            self._post("/resume", {})

    def _post(self, path: str, body: Mapping[str, Any]) -> None:
        try:
            self._remote.post(path, body)
        except RemoteError as error:
            route = path.partition("?")[0]
            if error.status in MISSING:
                raise InputError(
                    f"this vLLM has no route {route}; start it with `outrider serve --engine vllm --weight-updates`, "
                    "or with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config"
                ) from error
            raise InputError(f"vLLM failed at {route}: {shortened(str(error))}") from error
