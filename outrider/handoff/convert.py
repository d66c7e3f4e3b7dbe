"""The conversion of an export and its target into llama.cpp's files, by llama.cpp's own tools."""

import subprocess
from pathlib import Path

from outrider.core.inputs import InputError
from outrider.core.place import place_of
from outrider.handoff.engines.llama import SIZES
from outrider.handoff.exported_drafter import ExportedDrafter
from outrider.handoff.order import ExportRequest, is_local


def convert(order: ExportRequest, drafter: ExportedDrafter, script: Path, python: Path) -> None:
    """Convert the target and the drafter, beside the drafter.

    Args:
        script: llama.cpp's `convert_hf_to_gguf.py`.
        python: The Python that runs it. It needs the packages gguf, torch and transformers.

    Raises:
        InputError: The target lies in no folder, or the script fails.
    """
    if not is_local(order.target):
        raise InputError(f"llama.cpp converts folders, and the target {order.target} is a hub id; give its folder")
    size = SIZES.get(drafter.dtype, "f16")
    file, models = place_of(order.target).file, list[tuple[str, str, list[str]]]()
    if file is None:
        models.append((order.target, "target.gguf", []))
    else:
        (order.out / "target.gguf").symlink_to(file.resolve())
    if drafter.has_files and drafter.method != "draft-simple" and file is not None:
        raise InputError(
            f"llama.cpp converts a {drafter.name} head beside its target's folder, and the target is the file {file}; "
            "give the folder of the target"
        )
    if drafter.has_files:
        options = [] if drafter.method == "draft-simple" else ["--target-model-dir", order.target]
        models.append((str(order.out), "draft.gguf", options))
    for source, name, more in models:
        out = ["--outtype", size, "--outfile", str(order.out / name)]
        command = [str(python), str(script), source, *more, *out]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            last_line = (done.stdout.strip().splitlines() or ["nothing"])[-1]
            raise InputError(
                f"llama.cpp cannot convert {source}: {last_line}; {order.out / 'launch.sh'} has the commands"
            )
