"""vLLM behind the driver's lines: `plain`, `ngram` and `draft model`."""

import os
from typing import Any

from recipes.engines.talk import Asked, Decode, Options, drive


def load(options: Options) -> Decode:
    """An engine within this process, on as many cores as there are threads."""
    cores = sorted(os.sched_getaffinity(0))[: options.threads]
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    from vllm import LLM, SamplingParams

    drafting: dict[str, Any] | None = None
    if options.mode == "ngram":
        drafting = {"method": "ngram", "prompt_lookup_max": options.ngram}
    if options.mode == "draft model":
        drafting = {"method": "draft_model", "model": options.draft}
    if drafting is not None:
        drafting["num_speculative_tokens"] = options.draft_tokens
    engine = LLM(
        options.target,
        dtype=options.dtype,
        max_model_len=options.context,
        max_num_seqs=options.batch,
        speculative_config=drafting,
        enable_prefix_caching=False,
    )

    def decode(asked: Asked) -> list[list[int]]:
        law = SamplingParams(
            temperature=asked.temperature,
            max_tokens=asked.new_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in asked.prompts]
        return [list(made.outputs[0].token_ids) for made in engine.generate(prompts, law, use_tqdm=False)]

    return decode


if __name__ == "__main__":
    drive(load)
