"""The conversion of an export and its target into llama.cpp's files, by llama.cpp's own tools."""

import subprocess
import sys
from pathlib import Path

from outrider.core.inputs import InputError
from outrider.handoff.engines.llama import SIZES
from outrider.handoff.handed import Handed
from outrider.handoff.order import Order, is_local

SCRIPT = "convert_hf_to_gguf.py"


def convert(order: Order, handed: Handed, folder: Path) -> None:
    """Convert the target and the drafter, beside the drafter.

    Args:
        folder: llama.cpp's folder.

    Raises:
        InputError: There is no such tool, the target lies in no folder, or the tool fails.
    """
    script = folder / SCRIPT
    if not script.is_file():
        raise InputError(f"there is no {SCRIPT} in {folder}; give llama.cpp's folder with --llama-cpp")
    if not is_local(order.target):
        raise InputError(f"llama.cpp converts folders, and the target {order.target} is a hub id; give its folder")
    size = SIZES.get(handed.dtype, "f16")
    models = [(order.target, "target.gguf", [])]
    if handed.has_files:
        own = [] if handed.method == "draft-simple" else ["--target-model-dir", order.target]
        models.append((str(order.out), "draft.gguf", own))
    for source, name, more in models:
        out = ["--outtype", size, "--outfile", str(order.out / name)]
        command = [sys.executable, str(script), source, *more, *out]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            said = (done.stdout.strip().splitlines() or ["nothing"])[-1]
            raise InputError(f"llama.cpp cannot convert {source}: {said}; {order.out / 'launch.sh'} has the commands")
