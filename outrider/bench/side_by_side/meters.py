"""What a run takes besides time, where the machine tells it: peak memory, and energy."""

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

PROCESS = Path("/proc/self")
POWERCAP = Path("/sys/class/powercap")
"""Where Linux keeps the energy counters of processors (RAPL)."""
PERIOD = 100
"""Milliseconds between two readings of a GPU's power."""


@dataclass(kw_only=True)
class MeterReading:
    """What a run took; filled in when it ends.

    Attributes:
        peak_memory: Most bytes that the process, or the GPU's allocator, held; None where the machine does not tell.
        joules: Energy of the processor packages or of the GPU, with all else that ran on them; None likewise.
    """

    peak_memory: int | None = None
    joules: float | None = None


@contextmanager
def measured(device: torch.device, process: Path = PROCESS, powercap: Path = POWERCAP) -> Iterator[MeterReading]:
    """Measure the body.

    Args:
        process: The folder of this process, as Linux has it.
        powercap: The folder of energy counters, as Linux has it.
    """
    reading = MeterReading()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):
            # 5 sets the peak back to what is held now; see proc(5).
            (process / "clear_refs").write_text("5")
    watts = _watch_power() if on_gpu else None
    before = {} if on_gpu else counters(powercap)
    try:
        yield reading
    finally:
        if on_gpu:
            reading.peak_memory = torch.cuda.max_memory_allocated(device)
            reading.joules = None if watts is None else _stop_watching(watts)
        else:
            reading.peak_memory = peak_resident(process)
            reading.joules = spent(before, counters(powercap), powercap)


def peak_resident(process: Path = PROCESS) -> int | None:
    """Most bytes that the process held since its peak was set back; None where Linux does not tell."""
    with suppress(OSError):
        match = re.search(r"^VmHWM:\s+(\d+) kB", (process / "status").read_text(), re.MULTILINE)
        if match:
            return 1024 * int(match[1])
    return None


def counters(powercap: Path = POWERCAP) -> dict[str, int]:
    """Microjoules of each processor package; empty where there are none, or only root may read them."""
    microjoules = {}
    for package in sorted(powercap.glob("intel-rapl:[0-9]*")):
        # Below a package stand its parts, with two colons.
        if package.name.count(":") == 1:
            with suppress(OSError, ValueError):
                microjoules[package.name] = int((package / "energy_uj").read_text())
    return microjoules


def spent(before: Mapping[str, int], after: Mapping[str, int], powercap: Path = POWERCAP) -> float | None:
    """Joules between two readings; None where there are none. A counter that began again at 0 is counted on."""
    if not before or before.keys() != after.keys():
        return None
    total = 0
    for name, first in before.items():
        used = after[name] - first
        if used < 0:
            try:
                used += int((powercap / name / "max_energy_range_uj").read_text())
            except (OSError, ValueError):
                return None
        total += used
    return total / 1e6


def _watch_power() -> "subprocess.Popen[str] | None":
    """A process that writes the power of all GPUs, line by line; None where there is no such tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=power.draw", "--format=csv,noheader,nounits", f"--loop-ms={PERIOD}"]
    with suppress(OSError):
        return subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return None


def _stop_watching(process: "subprocess.Popen[str]") -> float | None:
    """Joules since the process was started."""
    process.terminate()
    out, _ = process.communicate()
    return joules_of(out)


def joules_of(lines: str) -> float | None:
    """Joules of readings of power in watts, one each `PERIOD`; None without any.

    Example:
        >>> joules_of("100.0\\n200.0\\n[N/A]\\n")
        30.0
    """
    watts = []
    for line in lines.splitlines():
        with suppress(ValueError):
            watts.append(float(line))
    return sum(watts) * PERIOD / 1000 if watts else None
