"""OpenVINO GenAI: `plain`, `prompt lookup` and `draft model`, with continuous batching."""

import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.bench.engines.driver import Driver, DriverRequest, EngineOutput, Options, serve
from outrider.bench.engines.engine import DRAFT_MODEL, LOOKUP, PeerEngine, python_driver
from outrider.bench.engines.environments import TORCH, Environment, EnvironmentFolder

HINTS = {"bfloat16": "bf16", "float32": "f32"}
ROUNDED: dict[str, dict[str, Any]] = {"int8": {"bits": 8}, "int4": {"bits": 4, "group_size": 64, "ratio": 1.0}}
"""What optimum is told about weights of fewer bits."""


class OpenvinoDriver(Driver):
    """A pipeline over models in OpenVINO's format."""

    def start(self, options: Options) -> None:
        """Load the models."""
        import openvino_genai as genai

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
        if options.mode == LOOKUP:
            more["prompt_lookup"] = True
        if options.mode == DRAFT_MODEL:
            more["draft_model"] = genai.draft_model(options.draft, "CPU", **device)
        self._options, self._sums = options, Counter[str]()
        self._pipeline = genai.ContinuousBatchingPipeline(options.target, scheduler, "CPU", {**device, **more})

    def ask(self, asked: DriverRequest) -> EngineOutput:
        """Decode the prompts of a run."""
        import numpy as np
        import openvino

        prompts = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in asked.prompts]
        laws = [self._law(asked, i) for i in range(len(prompts))]
        # The steps of a request are told only where it runs alone.
        size = 1 if self._options.counts else max(1, len(prompts))
        outputs: list[Any] = []
        for first in range(0, len(prompts), size):
            outputs += self._pipeline.generate(prompts[first : first + size], laws[first : first + size])
            if self._options.counts:
                self._count(outputs[-1])
        return EngineOutput(tokens=[list(each.m_generation_ids[0]) for each in outputs], counts=dict(self._sums))

    def _count(self, output: Any) -> None:
        """Add the drafts of an output, and what was accepted of them.

        The target's first forward reads the prompt and emits a token. Every other one verifies a draft, and emits the
        accepted tokens and one more. OpenVINO's own count of accepted tokens leaves out the last draft of an output;
        so does its count of draft tokens.
        """
        metrics = output.extended_perf_metrics
        if metrics is None or not hasattr(metrics, "main_model_metrics"):
            return
        steps = len(metrics.main_model_metrics.raw_metrics.m_durations) - 1
        self._sums["drafts"] += steps
        self._sums["draft_tokens"] += metrics.get_num_draft_tokens()
        self._sums["accepted_tokens"] += len(output.m_generation_ids[0]) - 1 - steps

    def _law(self, asked: DriverRequest, i: int) -> Any:
        """How the i-th prompt is decoded."""
        import openvino_genai as genai

        config = genai.GenerationConfig()
        config.max_new_tokens = asked.new_tokens
        config.ignore_eos = True
        # Those of the model's own config are added to them otherwise, and must hold the end token.
        config.eos_token_id, config.stop_token_ids = 0, {0}
        config.do_sample = asked.temperature > 0
        if config.do_sample:
            config.temperature, config.top_p = asked.temperature, 1.0
            config.rng_seed = 1000 * asked.seed + i
        if self._options.mode != "plain":
            config.num_assistant_tokens = self._options.draft_tokens
        if self._options.mode == LOOKUP:
            config.max_ngram_size = self._options.ngram
        return config


def write_model(source: str, out: str, weights: str) -> None:
    """Write a model and its tokenizer, without which no pipeline can be made.

    Args:
        weights: `int8` and `int4` (groups of 64) round them. Anything else writes float32, which holds those of
            bfloat16 exactly; what is computed in is the driver's choice.
    """
    import openvino
    import torch
    from openvino_tokenizers import convert_tokenizer
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
    from transformers import PreTrainedTokenizerFast

    from outrider.handoff.checks.openvino import readable

    options: dict[str, Any] = {"export": True, "compile": False, "torch_dtype": torch.float32}
    if weights in ROUNDED:
        options["quantization_config"] = OVWeightQuantizationConfig(**ROUNDED[weights])
    else:
        options["load_in_8bit"] = False
    with tempfile.TemporaryDirectory() as room:
        readable_source = readable(source, Path(room, "source"))
        OVModelForCausalLM.from_pretrained(readable_source, **options).save_pretrained(Path(out))
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(Path(source) / "tokenizer.json"))
    there, back = convert_tokenizer(tokenizer, with_detokenizer=True)
    openvino.save_model(there, Path(out) / "openvino_tokenizer.xml")
    openvino.save_model(back, Path(out) / "openvino_detokenizer.xml")


def convert(room: EnvironmentFolder, source: Path, out: Path, dtype: str) -> None:
    """As a folder; a dtype is told to the driver instead."""
    room.call("outrider.bench.engines.openvino", "write_model", source, out, dtype)


def make(room: EnvironmentFolder) -> None:
    """OpenVINO GenAI, and what converts models for it, without the library for pictures that may want another torch."""
    room.pip("install", *room.pins)
    room.pip("uninstall", "--yes", "torchvision")


ENGINE = PeerEngine(
    title="OpenVINO GenAI",
    modes=("plain", LOOKUP, DRAFT_MODEL),
    command=python_driver("openvino"),
    environment=Environment(
        name="openvino",
        pins=(TORCH, "transformers==4.57.6", "openvino-genai==2026.4.1", "optimum-intel==2.2.0", "nncf==3.4.0"),
        make=make,
    ),
    convert=convert,
    exports="openvino",
    digests_first=True,
)
ROUNDED_ENGINES = {
    f"openvino_{weights}": replace(ENGINE, title=f"{ENGINE.title} {weights}", weights=weights) for weights in ROUNDED
}
"""The same with weights of fewer bits, by their names among the peers."""


if __name__ == "__main__":
    serve(OpenvinoDriver())
