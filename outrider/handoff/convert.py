"""The conversion of an export and its target into llama.cpp's files, by llama.cpp's own tools."""

import subprocess
from pathlib import Path

from outrider.core.inputs import InputError
from outrider.handoff.engines.llama import SIZES
from outrider.handoff.handed import Handed
from outrider.handoff.order import Order, is_local


def convert(order: Order, handed: Handed, script: Path, python: Path) -> None:
    """Convert the target and the drafter, beside the drafter.

    Args:
        script: llama.cpp's `convert_hf_to_gguf.py`.
        python: The Python that runs it. It needs the packages gguf, torch and transformers.

    Raises:
        InputError: The target lies in no folder, or the script fails.
    """
    if not is_local(order.target):
        raise InputError(f"llama.cpp converts folders, and the target {order.target} is a hub id; give its folder")
    size = SIZES.get(handed.dtype, "f16")
    models: list[tuple[str, str, list[str]]] = [(order.target, "target.gguf", [])]
    if handed.has_files:
        own = [] if handed.method == "draft-simple" else ["--target-model-dir", order.target]
        models.append((str(order.out), "draft.gguf", own))
    for source, name, more in models:
        out = ["--outtype", size, "--outfile", str(order.out / name)]
        command = [str(python), str(script), source, *more, *out]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            said = (done.stdout.strip().splitlines() or ["nothing"])[-1]
            raise InputError(f"llama.cpp cannot convert {source}: {said}; {order.out / 'launch.sh'} has the commands")
