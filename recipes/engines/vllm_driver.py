"""vLLM behind the driver's lines: `plain`, `ngram`, `draft model`, and heads by the names that vLLM has for them."""

import os
from typing import Any

from recipes.engines.talk import Asked, Options, drive

HEADS = ("medusa", "eagle", "eagle3", "dflash", "dspark")
"""vLLM's methods for heads that read the target's hidden states."""
PLAIN = "plain, not compiled"
COUNTED = "vllm:spec_decode_num_"
"""What the names of its counters of drafts begin with."""


class Engine:
    """vLLM within this process.

    Args:
        llm: vLLM's engine.
        law: Its class of sampling parameters.
        counts: Whether it counts drafts.
    """

    def __init__(self, llm: Any, law: Any, *, counts: bool) -> None:
        self._llm, self._law, self._counts = llm, law, counts

    def __call__(self, asked: Asked) -> list[list[int]]:
        """The new tokens of each prompt."""
        law = self._law(
            temperature=asked.temperature,
            max_tokens=asked.new_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in asked.prompts]
        return [list(made.outputs[0].token_ids) for made in self._llm.generate(prompts, law, use_tqdm=False)]

    def counts(self) -> dict[str, int]:
        """Drafts, draft tokens and accepted tokens so far."""
        if not self._counts:
            return {}
        told = {each.name: each for each in self._llm.get_metrics() if each.name.startswith(COUNTED)}
        names = ("drafts", "draft_tokens", "accepted_tokens")
        return {name: int(told[COUNTED + name].value) for name in names if COUNTED + name in told}


def load(options: Options) -> Engine:
    """An engine on as many cores as there are threads.

    Raises:
        ValueError: vLLM refuses the options; it says why.
    """
    cores = sorted(os.sched_getaffinity(0))[: options.threads]
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    from pydantic import ValidationError
    from vllm import LLM, SamplingParams

    drafting: dict[str, Any] | None = None
    if options.mode == "ngram":
        drafting = {"method": "ngram", "prompt_lookup_max": options.ngram}
    if options.mode == "draft model":
        drafting = {"method": "draft_model", "model": options.draft}
    if options.mode in HEADS:
        drafting = {"method": options.mode, "model": options.draft}
    if drafting is not None:
        drafting["num_speculative_tokens"] = options.draft_tokens
    try:
        llm = LLM(
            options.target,
            dtype=options.dtype,
            max_model_len=options.context,
            max_num_seqs=options.batch,
            speculative_config=drafting,
            enable_prefix_caching=False,
            disable_log_stats=options.mode not in HEADS,
            # To compare tokens is not worth the minutes of compiling.
            enforce_eager=options.mode in (*HEADS, PLAIN),
        )
    except ValidationError as error:
        # Its last line, which is what a recipe tells, would be an address.
        raise ValueError("; ".join(each["msg"].removeprefix("Value error, ") for each in error.errors())) from error
    return Engine(llm, SamplingParams, counts=options.mode in HEADS)


if __name__ == "__main__":
    drive(load)
