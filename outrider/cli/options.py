"""Options that several commands share, each declared once, and the engine that they describe."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers.utils import logging

from outrider.constraints.grammar import Grammar, ebnf, json_schema
from outrider.constraints.grammar import regex as matching
from outrider.engine.engine import Engine
from outrider.load import load
from outrider.types import InputError, Sampling

Target = Annotated[
    str | None, typer.Option(help="Directory or hub id of the target; without it, the pair that ships with Outrider.")
]
Drafter = Annotated[str | None, typer.Option(help="Who guesses, as name:key=value; see `outrider methods`.")]
Tree = Annotated[str, typer.Option(help="How drafts grow.")]
Verifier = Annotated[
    str | None, typer.Option(help="Which draft tokens survive; by default the best lossless rule for the tree.")
]
Length = Annotated[str | None, typer.Option(help="When to stop drafting, such as fixed:5.")]
Decoding = Annotated[str, typer.Option(help="step, or pearl to draft and verify at once.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1; by default the GPU where there is one.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, float64, bfloat16 or float16.")]
Attention = Annotated[str | None, typer.Option("--attn-implementation", help="sdpa, eager or flex_attention.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")]
AllowLossy = Annotated[bool, typer.Option("--allow-lossy", help="Let rules pass that change the target's law.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]
BatchSize = Annotated[int, typer.Option(help="Most requests at once.")]
Compile = Annotated[bool, typer.Option("--compile", help="Compile the models' forwards; the first ones take long.")]
Prepack = Annotated[
    bool | None,
    typer.Option("--prepack/--no-prepack", help="Lay out weights for the CPU's kernels; by default where it pays."),
]
MaxContext = Annotated[int | None, typer.Option(help="Longest context in tokens.")]

Temperature = Annotated[float | None, typer.Option(help="0 is greedy; by default what the model's config says.")]
TopK = Annotated[int | None, typer.Option(help="Keep the k most likely tokens.")]
TopP = Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this mass, in (0, 1].")]
MinP = Annotated[float | None, typer.Option(help="Drop tokens below this share of the likeliest.")]
RepetitionPenalty = Annotated[float | None, typer.Option(help="Above 1 discourages tokens of prompt and output.")]
FrequencyPenalty = Annotated[float | None, typer.Option(help="Subtracted per occurrence in the output.")]
PresencePenalty = Annotated[float | None, typer.Option(help="Subtracted once if in the output.")]
Seed = Annotated[int | None, typer.Option(help="Makes the draws repeatable.")]
MaxNewTokens = Annotated[int, typer.Option(help="Most tokens to generate per prompt.")]
JsonSchema = Annotated[
    str | None, typer.Option(help="Say JSON that fits this schema, a file or the schema itself; '{}' is any JSON.")
]
Regex = Annotated[str | None, typer.Option(help="Say what this regular expression matches.")]
GrammarFile = Annotated[
    Path | None, typer.Option("--grammar", help="Say what this file's EBNF grammar (GBNF, rule `root`) describes.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the shared options say."""

    target: str | None
    drafter: str | None
    tree: str
    verifier: str | None
    length: str | None
    decoding: str
    allow_lossy: bool
    device: str | None
    dtype: str
    attn_implementation: str | None
    revision: str | None
    trust_remote_code: bool
    batch_size: int
    max_context: int | None
    compile: bool
    prepack: bool | None

    def engine(self) -> Engine:
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        return load(
            self.target,
            drafter=self.drafter,
            tree=self.tree,
            verifier=self.verifier,
            length=self.length,
            decoding=self.decoding,
            allow_lossy=self.allow_lossy,
            device=self.device,
            dtype=self.dtype,
            attn_implementation=self.attn_implementation,
            revision=self.revision,
            trust_remote_code=self.trust_remote_code,
            max_slots=self.batch_size,
            max_context=self.max_context,
            compile=self.compile,
            prepack=self.prepack,
        )


def sampling(default: Sampling, **given: Any) -> Sampling:
    """The engine's default settings with what was given on the command line in their place."""
    return replace(default, **{key: value for key, value in given.items() if value is not None})


def constraint(schema: str | None, regex: str | None, grammar: Path | None) -> Grammar | None:
    """What the output must be, if the command line says so."""
    options = (("--json-schema", schema), ("--regex", regex), ("--grammar", grammar))
    given = [name for name, value in options if value is not None]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)} were given together; an output follows one of them")
    if schema is not None:
        inline = schema.lstrip().startswith("{") or schema.strip() in ("true", "false")
        return json_schema(schema if inline else text_of(Path(schema), "JSON schema", "a file, or the schema itself"))
    if grammar is not None:
        return ebnf(text_of(grammar, "grammar", "a file"))
    return None if regex is None else matching(regex)


def text_of(file: Path, what: str, wanted: str) -> str:
    """The text of a file that was named on the command line.

    Args:
        what: What the file holds.
        wanted: What to give instead, where there is no such file.
    """
    if not os.path.isfile(file):
        raise InputError(f"there is no {what} file {file}; give {wanted}")
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}") from error
