"""Decodes with OpenVINO GenAI. Both models are converted by optimum where that was not done.

`python engine.py --target TARGET --prompt TEXT` answers a prompt.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
HINTS = {"bfloat16": "bf16", "float32": "f32", "float16": "f16"}
SIZES = {"float32": "fp32"}
"""optimum's names of dtypes; other dtypes become float16."""


def converted(source: str, out: Path, expected: Mapping[str, Any], *, trusted: bool = False) -> Path:
    """The folder of a model in OpenVINO's format, which is made unless it is there, or unless the source is one."""
    for folder in (Path(source), out):
        if (folder / "openvino_model.xml").is_file():
            return folder
    size = SIZES.get(expected["dtype"], "fp16")
    tool = shutil.which("optimum-cli", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if tool is None:
        sys.exit("there is no optimum-cli in this environment; install optimum-intel")
    with tempfile.TemporaryDirectory(dir=out.parent) as room:
        options = ["--task", "text-generation-with-past", "--weight-format", size]
        model = readable(source, Path(room, "source"))
        fresh = Path(room, "made")
        command = [tool, "export", "openvino", *options, *(["--trust-remote-code"] * trusted), "--model", model, fresh]
        if subprocess.run(list(map(str, command))).returncode:
            sys.exit(f"optimum-cli cannot convert {source}")
        fresh.rename(out)
    return out


def readable(source: str, copy: Path) -> str:
    """A model as older versions of transformers read it: a folder with the same files, and with the old names of the
    keys of the rotation and of the tokenizer's class. A hub id stays as it is.
    """
    if not Path(source).is_dir():
        return source
    copy.mkdir()
    for each in Path(source).iterdir():
        if each.is_file() and each.suffix != ".json":
            (copy / each.name).symlink_to(each.resolve())
        elif each.is_file():
            content = json.loads(each.read_text(encoding="utf-8"))
            (copy / each.name).write_text(json.dumps(renamed(each.name, content)), encoding="utf-8")
    return str(copy)


def renamed(name: str, content: Any) -> Any:
    """The content of a JSON file of a model, with the names that transformers 4 knows."""
    if name == "tokenizer_config.json":
        extra = content.get("extra_special_tokens")
        kept = {
            key: value for key, value in content.items() if key != "extra_special_tokens" or isinstance(value, dict)
        }
        if content.get("tokenizer_class") == "TokenizersBackend":
            kept["tokenizer_class"] = "PreTrainedTokenizerFast"
        return {**kept, "additional_special_tokens": extra} if isinstance(extra, list) else kept
    rope = content.get("rope_parameters") if name == "config.json" else None
    if not rope or "rope_theta" in content:
        return content
    # A model with sliding windows has a rotation for each kind of layer.
    whole = rope.get("full_attention", rope)
    old = {
        "rope_theta": whole.get("rope_theta"),
        "rope_scaling": whole if whole.get("rope_type", "default") != "default" else None,
        "rope_local_base_freq": rope.get("sliding_attention", {}).get("rope_theta"),
        "torch_dtype": content.get("dtype"),
    }
    return {**content, **{key: value for key, value in old.items() if value is not None or key == "rope_scaling"}}


def models(expected: Mapping[str, Any], target: str) -> tuple[str, Any, dict[str, str]]:
    """The target's folder, the draft model, and the options of both."""
    import openvino_genai as genai

    hints = {"INFERENCE_PRECISION_HINT": HINTS[expected["dtype"]]}
    there = converted(target, HERE / "target-openvino", expected)
    # A head is code of its own for transformers.
    trusted = expected["method"] != "draft_model"
    draft = converted(str(HERE), HERE / "draft-openvino", expected, trusted=trusted)
    return str(there), genai.draft_model(str(draft), "CPU", **hints), hints


def decode(expected: Mapping[str, Any], target: str, url: str | None) -> Mapping[str, Any]:
    """The tokens of each prompt, and in how many steps OpenVINO said them."""
    import numpy
    import openvino
    import openvino_genai as genai

    there, draft, hints = models(expected, target)
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.enable_prefix_caching = 1, False
    pipeline = genai.ContinuousBatchingPipeline(there, scheduler, "CPU", {**hints, "draft_model": draft})
    law = genai.GenerationConfig()
    law.eos_token_id, law.stop_token_ids, law.ignore_eos = 0, {0}, True
    law.num_assistant_tokens = expected["num_speculative_tokens"]
    results = []
    # The forwards of the target are told for a run, so each prompt has its own. The first one reads the prompt.
    for prompt, ours in zip(expected["prompts"], expected["tokens"], strict=True):
        law.max_new_tokens = len(ours)
        results += pipeline.generate([openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))], [law])
    forwards = [len(each.extended_perf_metrics.main_model_metrics.raw_metrics.m_durations) for each in results]
    return {"tokens": [list(each.m_generation_ids[0]) for each in results], "steps": sum(forwards) - len(results)}


def answer(target: str, prompt: str, new_tokens: int) -> str:
    """What the target says to a prompt, as a chat where it has a template."""
    import openvino_genai as genai

    expected = json.loads((HERE / "expected.json").read_text(encoding="utf-8"))
    there, draft, hints = models(expected, target)
    pipeline = genai.LLMPipeline(there, "CPU", draft_model=draft, **hints)
    length = expected["num_speculative_tokens"]
    return str(pipeline.generate(prompt, max_new_tokens=new_tokens, num_assistant_tokens=length))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Answer a prompt with OpenVINO GenAI and the drafter in this folder.")
    parser.add_argument("--target", required=True, help="The target's hub id or folder.")
    parser.add_argument("--prompt", default="Hello")
    parser.add_argument("--new-tokens", type=int, default=128)
    options = parser.parse_args()
    print(answer(options.target, options.prompt, options.new_tokens))
