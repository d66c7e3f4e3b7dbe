"""OpenVINO GenAI behind the driver's lines: `plain`, `prompt lookup` and `draft model`, with continuous batching."""

from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

from recipes.engines.talk import Asked, Decode, Options, drive

HINTS = {"bfloat16": "bf16", "float32": "f32"}


def load(options: Options) -> Decode:
    """A pipeline over models in OpenVINO's format."""
    device = {
        "INFERENCE_NUM_THREADS": options.threads,
        "INFERENCE_PRECISION_HINT": HINTS[options.dtype],
        "PERFORMANCE_HINT": "LATENCY",
    }
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs = options.batch
    scheduler.max_num_batched_tokens = options.batch * options.context
    scheduler.cache_size = 1
    scheduler.dynamic_split_fuse = False
    scheduler.enable_prefix_caching = False
    more: dict[str, Any] = {}
    if options.mode == "prompt lookup":
        more["prompt_lookup"] = True
    if options.mode == "draft model":
        more["draft_model"] = genai.draft_model(options.draft, "CPU", **device)
    pipeline = genai.ContinuousBatchingPipeline(options.target, scheduler, "CPU", {**device, **more})

    def law(asked: Asked, i: int) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens = asked.new_tokens
        config.ignore_eos = True
        config.eos_token_id = 0
        config.do_sample = asked.temperature > 0
        if config.do_sample:
            config.temperature, config.top_p = asked.temperature, 1.0
            config.rng_seed = 1000 * asked.seed + i
        if options.mode != "plain":
            config.num_assistant_tokens = options.draft_tokens
        if options.mode == "prompt lookup":
            config.max_ngram_size = options.ngram
        return config

    def decode(asked: Asked) -> list[list[int]]:
        prompts = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in asked.prompts]
        made = pipeline.generate(prompts, [law(asked, i) for i in range(len(prompts))])
        return [list(each.m_generation_ids[0]) for each in made]

    return decode


if __name__ == "__main__":
    drive(load)
