"""The command that starts vLLM for a setup, and what of a setup vLLM has no form for."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from outrider import catalog
from outrider.assembly import completed
from outrider.core.inputs import InputError
from outrider.drafters.traits import exports_of
from outrider.serve.vllm.python import VllmPython
from outrider.setup import Setup

SPECULATIVE = "--speculative-config"
WEIGHTS = "--weight-transfer-config"
VERIFIERS = {"token": "standard", "block": "block"}
"""vLLM's names of our verifiers."""
SMOKE_TEST = "expected.json"
"""The file by which an exported drafter is known."""
TOKENS = 5
"""Draft tokens of a step where no length is given."""
GREEDY_ALONE = "vLLM's build for CPUs makes wrong tokens above temperature 0 while it drafts"
"""Seen in 0.32 with a draft model, drawn and greedy, and with `ngram`: random words, where plain decoding writes
sentences."""


@dataclass(frozen=True, kw_only=True)
class VllmSpeculation:
    """How vLLM drafts.

    Attributes:
        method: vLLM's name of the drafter.
        model: The draft model's or head's directory or hub id; None where it looks tokens up.
        num_tokens: Draft tokens of a step.
        verifier: vLLM's `rejection_sample_method`.
        name: Our name of the drafter.
        draws: Whether its drafts are drawn (`draft_sample_method`); otherwise they are greedy.
        options: What else the drafter needs of vLLM.
    """

    method: str
    name: str = ""
    draws: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None
    num_tokens: int = TOKENS
    verifier: str = "standard"

    @property
    def config(self) -> dict[str, Any]:
        """vLLM's `speculative_config`.

        Example:
            >>> VllmSpeculation(method="ngram", num_tokens=3).config
            {'method': 'ngram', 'num_speculative_tokens': 3, 'rejection_sample_method': 'standard'}
        """
        config: dict[str, Any] = {"method": self.method}
        if self.model is not None:
            config["model"] = self.model
        config |= {"num_speculative_tokens": self.num_tokens, "rejection_sample_method": self.verifier}
        # Its default drafts greedily, which accepts less above temperature 0. What looks tokens up has no rows.
        if self.model is not None:
            config["draft_sample_method"] = "probabilistic" if self.draws else "greedy"
        return config | dict(self.options)

    def exported(self, launch: "Launch", setup: Setup, folder: Path) -> "VllmSpeculation":
        """The same with a head that is written as vLLM reads it. A draft model, or what was exported before, stays.

        Args:
            folder: Where it goes; the folder does not exist yet.

        Raises:
            InputError: vLLM cannot load the head. The message names what it can.
        """
        if self.model is None or self.method == "draft_model" or (Path(self.model) / SMOKE_TEST).is_file():
            return self
        # The refusals above come without the models that an export loads.
        from outrider.handoff.export import export
        from outrider.handoff.order import ExportRequest

        exported = export(
            ExportRequest(
                to="vllm",
                target=launch.target,
                drafter=f"{self.name}:path={self.model}",
                out=folder,
                num_speculative_tokens=None if setup.length is None else self.num_tokens,
                measure=False,
                revision=setup.revision,
                trust_remote_code=setup.trust_remote_code,
            )
        )
        speculative = exported.drafter.speculative()
        return replace(
            self,
            method=exported.drafter.method,
            model=str(folder),
            num_tokens=speculative["num_speculative_tokens"],
            draws=speculative["draft_sample_method"] == "probabilistic",
            options=exported.drafter.exports.options,
        )


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How vLLM is started.

    Attributes:
        target: Directory or hub id.
        speculation: None decodes plainly.
        names: What clients call the model.
        host: The address that it listens at.
        port: The port; 0 takes a free one.
        flags: vLLM's flags for the rest of the setup.
        more_flags: vLLM's flags for what a command asks besides.
        updates_weights: Whether its drafter takes new weights while it runs.
        engine_args: What the user passes through; it goes last, so that it wins.
        threads: Threads on a CPU.
    """

    target: str
    speculation: VllmSpeculation | None = None
    names: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 0
    more_flags: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    engine_args: tuple[str, ...] = ()
    threads: int | None = None
    updates_weights: bool = False

    @classmethod
    def of(cls, setup: Setup, python: VllmPython, engine_args: str | None = None, **more: Any) -> "Launch":
        """The launch for a setup. Options that vLLM has no form for are not looked at: commands refuse them before.

        Args:
            engine_args: vLLM's own flags, as a shell would read them.
            more: Other fields.

        Raises:
            InputError: vLLM has no form for a value of the setup. The message says what to do.
        """
        passed = arguments_of(engine_args)
        wanted = completed(setup, heads=False)
        speculates = has_speculation(passed)
        named = [name for name in ("drafter", "length", "verifier") if getattr(setup, name) is not None]
        if speculates and named:
            raise InputError(f"--engine-args has {SPECULATIVE} and --{named[0]} was given too; leave out one of them")
        return cls(
            target=_absolute(str(wanted.target)),
            speculation=None if speculates else speculation_of(wanted, setup, python),
            flags=flags_of(setup),
            engine_args=passed,
            threads=setup.threads,
            **more,
        )

    @property
    def drafts(self) -> bool:
        """Whether it drafts."""
        return self.speculation is not None or has_speculation(self.engine_args)

    @property
    def method(self) -> str:
        """How it drafts, in a word or two."""
        return "as its flags say" if self.speculation is None else self.speculation.method

    def exported(self, setup: Setup, folder: Path) -> "Launch":
        """The same, with a head that is written to a folder as vLLM reads it."""
        if self.speculation is None:
            return self
        return replace(self, speculation=self.speculation.exported(self, setup, folder))

    def arguments(self, port: int) -> list[str]:
        """What vLLM's command is called with.

        Args:
            port: Where it listens.
        """
        command = ["serve", self.target, "--host", self.host, "--port", str(port)]
        if self.names:
            command += ["--served-model-name", *self.names]
        if self.drafts:
            # Without drafts vLLM refuses to count them.
            command += ["--per-request-spec-decode-metrics", "summary"]
        command += ["--enable-per-request-metrics"]
        command += ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log", *self.flags, *self.more_flags]
        if self.speculation is not None:
            command += [SPECULATIVE, json.dumps(self.speculation.config)]
        if self.updates_weights:
            command += [WEIGHTS, json.dumps({"backend": "outrider_files"})]
        return [*command, *self.engine_args]


def arguments_of(text: str | None) -> tuple[str, ...]:
    """vLLM's flags as a shell would read them.

    Example:
        >>> arguments_of("--tensor-parallel-size 2 --quantization fp8")
        ('--tensor-parallel-size', '2', '--quantization', 'fp8')
    """
    try:
        words = tuple(shlex.split(text or ""))
    except ValueError as error:
        raise InputError(f"--engine-args must be flags as a shell reads them, got {text!r}: {error}") from error
    if words and not words[0].startswith("-"):
        raise InputError(f"--engine-args must be vLLM's flags, such as '--tensor-parallel-size 2', got {text!r}")
    for owned in ("--host", "--port", "--uds", "--api-key"):
        if any(each.partition("=")[0] == owned for each in words):
            raise InputError(f"--engine-args must not have {owned}, which Outrider gives to vLLM; leave it out")
    return words


def has_speculation(arguments: Sequence[str]) -> bool:
    """Whether vLLM's flags say how it drafts.

    Example:
        >>> has_speculation(["--speculative-config={}"]), has_speculation(["--dtype", "float32"])
        (True, False)
    """
    return any(each.partition("=")[0] in (SPECULATIVE, "--speculative_config", "-sc") for each in arguments)


def speculation_of(wanted: Setup, requested: Setup, python: VllmPython) -> VllmSpeculation | None:
    """How vLLM drafts for a setup; None if it shall not.

    Args:
        wanted: The setup with its defaults.
        requested: The setup as it was requested.

    Raises:
        InputError: vLLM has no such drafter, tree, verifier, length or decoding.
    """
    for name, only in (("tree", "chain"), ("decoding", "step")):
        value = str(getattr(wanted, name))
        if value != only:
            raise InputError(f"vLLM has no {name} {value!r}; it drafts chains step by step: leave out --{name}")
    drafter, path = drafter_of(wanted, requested, python)
    if drafter == "none":
        return None
    verifier = str(wanted.verifier or "token")
    if verifier not in VERIFIERS:
        raise InputError(f"vLLM has no verifier {verifier!r}; it has {' and '.join(VERIFIERS)}: leave out --verifier")
    if verifier == "block" and not has_newer_runner(python):
        # The first model runner would run the standard rule without a word.
        raise InputError(
            "vLLM verifies blocks in its second model runner alone, which needs Triton on a GPU, and this build has "
            "none; use --verifier token"
        )
    length = _length(requested.length)
    exports = exports_of(catalog.rows("drafter")[drafter].kind)
    return VllmSpeculation(
        method=str(exports.vllm),
        name=drafter,
        draws=exports.draws,
        options=exports.options,
        model=path,
        num_tokens=length,
        verifier=VERIFIERS[verifier],
    )


def drafter_of(wanted: Setup, requested: Setup, python: VllmPython) -> tuple[str, str | None]:
    """The drafter's name, and the folder of its weights as vLLM reads it."""
    spec = str(wanted.drafter)
    if requested.drafter is None and spec == "suffix" and "arctic_inference" not in python.has:
        # vLLM's own suffix decoding is a package that is not there; n-grams are its nearest.
        return "ngram", None
    drafter = catalog.make("drafter", spec)
    name = catalog.name_of(drafter)
    if name == "none":
        return name, None
    if name == "suffix" and "arctic_inference" not in python.has:
        raise InputError(
            "vLLM's drafter suffix needs arctic-inference, which that environment lacks; install it there, or use "
            "--drafter ngram"
        )
    if exports_of(catalog.rows("drafter")[name].kind).vllm is None:
        able = ", ".join(each for each, row in catalog.rows("drafter").items() if exports_of(row.kind).vllm)
        raise InputError(f"vLLM has no drafter like {name!r}; it has those of {able}")
    if exports_of(catalog.rows("drafter")[name].kind).newer_runner and not has_newer_runner(python):
        raise InputError(
            f"vLLM drafts with {name} heads in its second model runner alone, which needs Triton on a GPU, and this "
            "build has none; use a head of another kind, such as dflash or eagle3"
        )
    path = getattr(drafter, "path", None)
    return name, None if path is None else _absolute(str(path))


def must_be_greedy(launch: Launch, python: VllmPython) -> bool:
    """Whether vLLM makes wrong tokens above temperature 0, because it drafts on a CPU."""
    return python.is_cpu and launch.drafts


def has_newer_runner(python: VllmPython) -> bool:
    """Whether vLLM's second model runner can run there."""
    return not python.is_cpu and "triton" in python.has


def flags_of(setup: Setup) -> tuple[str, ...]:
    """vLLM's flags for options that it has under other names."""
    if str(setup.dtype) == "float64":
        raise InputError("vLLM does not compute in float64; use --dtype float32")
    flags: list[str] = [] if setup.dtype == "auto" else ["--dtype", str(setup.dtype)]
    for flag, value in (
        ("--tokenizer", None if setup.tokenizer is None else _absolute(str(setup.tokenizer))),
        ("--revision", setup.revision),
        ("--max-num-seqs", setup.max_slots),
        ("--max-model-len", setup.max_context),
    ):
        if value is not None:
            flags += [flag, str(value)]
    if setup.trust_remote_code:
        flags.append("--trust-remote-code")
    if setup.ignore_generation_config:
        flags += ["--generation-config", "vllm"]
    return tuple(flags)


def check_clients(launch: Launch, python: VllmPython, *, lossy: bool) -> None:
    """Raise InputError where requests of others would get wrong tokens.

    Args:
        lossy: Whether that is allowed.
    """
    if must_be_greedy(launch, python) and not lossy:
        raise InputError(
            f"{GREEDY_ALONE}; serve plainly with --drafter none, or give --allow-lossy and let clients ask for "
            "temperature 0 alone"
        )


def check_request(fields: Mapping[str, Any], launch: Launch, python: VllmPython) -> None:
    """Raise InputError for fields of a request that vLLM refuses, ignores or gets wrong where it drafts."""
    if must_be_greedy(launch, python) and fields.get("temperature") != 0:
        raise InputError(f"{GREEDY_ALONE}; give --temperature 0, or decode plainly with --drafter none")
    for name in ("min_p", "logit_bias"):
        if launch.drafts and fields.get(name):
            raise InputError(
                f"vLLM does not keep {name} while it drafts; leave out --{name.replace('_', '-')}, or decode plainly "
                "with --drafter none"
            )


def _length(length: Any) -> int:
    """Draft tokens of a step."""
    if length is None:
        return TOKENS
    name, _, number = str(length).partition(":")
    number = number.removeprefix("length=")
    if name != "fixed" or not number.isdecimal() or not int(number):
        raise InputError(
            f"vLLM has no length policy {str(length)!r}; it drafts a fixed number: use --length fixed:{TOKENS}. "
            "`outrider plan --for vllm` prints a number for each batch size, for --engine-args"
        )
    return int(number)


def _absolute(path: str) -> str:
    """A folder by its whole name, because vLLM runs elsewhere; a hub id stays."""
    return str(Path(path).absolute()) if Path(path).exists() else path
