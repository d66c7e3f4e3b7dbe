"""Decodes prompts with OpenVINO GenAI."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

HINTS = {"bfloat16": "bf16", "float32": "f32", "float16": "f16"}


def decode(expected: Mapping[str, Any], target: str, url: str | None) -> Mapping[str, Any]:
    """The tokens of each prompt, and in how many steps OpenVINO said them. The target is the folder that optimum
    wrote.
    """
    import numpy
    import openvino
    import openvino_genai as genai

    here = Path(__file__).resolve().parent
    hints = {"INFERENCE_PRECISION_HINT": HINTS[expected["dtype"]]}
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.enable_prefix_caching = 1, False
    draft = genai.draft_model(str(here / "draft-openvino"), "CPU", **hints)
    pipeline = genai.ContinuousBatchingPipeline(target, scheduler, "CPU", {**hints, "draft_model": draft})
    law = genai.GenerationConfig()
    law.max_new_tokens, law.ignore_eos, law.eos_token_id = expected["new_tokens"], True, 0
    law.num_assistant_tokens = expected["num_speculative_tokens"]
    prompts = [openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt in expected["prompts"]]
    # The forwards of the target are told for a run, so each prompt has its own. The first one reads the prompt.
    made = [pipeline.generate([prompt], [law])[0] for prompt in prompts]
    forwards = [len(each.extended_perf_metrics.main_model_metrics.raw_metrics.m_durations) for each in made]
    return {"tokens": [list(each.m_generation_ids[0]) for each in made], "steps": sum(forwards) - len(made)}
