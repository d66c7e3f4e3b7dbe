"""Which engine a command runs on, and how vLLM is started. Imports nothing heavy."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.core.inputs import InputError, unknown
from outrider.setup import Setup

if TYPE_CHECKING:
    from outrider.serve.vllm.process import VllmProcess
else:
    VllmProcess = object

OURS, VLLM = "outrider", "vllm"
ENGINES = (OURS, VLLM)


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """Which engine a command runs on.

    Attributes:
        engine: `outrider`, or `vllm`, which is started in a process of its own with the same target and drafter.
        engine_args: vLLM's own flags, such as '--tensor-parallel-size 2'; they win over Outrider's.

    Raises:
        InputError: There is no such engine, or flags are given for none.
    """

    engine: str = OURS
    engine_args: str | None = None

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise unknown("engine", self.engine, ENGINES)
        if self.engine_args is not None and not self.is_vllm:
            raise InputError("--engine-args are vLLM's flags; give --engine vllm too")

    @property
    def is_vllm(self) -> bool:
        """Whether vLLM runs."""
        return self.engine == VLLM

    def process(
        self,
        setup: Setup,
        python: Path | None,
        *,
        keys: tuple[str, ...] | None = None,
        shows_log: bool = False,
        **launch: object,
    ) -> VllmProcess:
        """vLLM's process for a setup, not started yet.

        Args:
            python: The Python that has vLLM.
            keys: As of `VllmProcess`.
            shows_log: As of `VllmProcess`.
            launch: Other fields of the launch.
        """
        from outrider.serve.vllm.launch import Launch
        from outrider.serve.vllm.process import VllmProcess, tell
        from outrider.serve.vllm.python import VllmPython

        if python is None:
            raise InputError(
                "--engine vllm needs --vllm-python, a Python that has vLLM; its libraries differ from Outrider's, so "
                "it has an environment of its own"
            )
        installed = VllmPython.of(python)
        wanted = Launch.of(setup, installed, self.engine_args, **launch)
        process = VllmProcess(installed, wanted, keys=keys, shows_log=shows_log, tell=tell)
        try:
            process.launch = process.launch.exported(setup, process.folder / "drafter")
        except BaseException:
            process.stop()
            raise
        return process


@dataclass(frozen=True, kw_only=True)
class EngineOptions(EngineChoice):
    """Which engine a command runs on, and which Python has it.

    Attributes:
        vllm_python: A Python that has vLLM, for --engine vllm.
    """

    vllm_python: Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vllm_python is not None and not self.is_vllm:
            raise InputError("--vllm-python is where vLLM is installed; give --engine vllm too")
