"""What shall be exported, and where to."""

from dataclasses import dataclass
from pathlib import Path

from outrider.core.inputs import InputError, unknown
from outrider.core.option import check, option
from outrider.drafters.exports import ENGINES

NEW_TOKENS, PROMPTS = 48, 4
"""Tokens of an output, and outputs, of which the smoke test is made."""


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """What a user wants.

    Attributes:
        to: The engine, one of `ENGINES`.
        target: Directory or hub id of the target.
        drafter: The drafter as it is written elsewhere, with its path; for a `dry_run` its name, with options of
            training behind it.
        out: The folder that is written. It must be new or empty.
        verifier_id: Public name of the target for the written files; by default the target, if it is a hub id.
        dtype: The dtype of the written weights, and of the target in the smoke test; `auto` is the target's own.
        num_speculative_tokens: Draft tokens of a step; by default the plan's, or as many as the drafter guesses, or 5.
        plan: A file with what `outrider plan --json` printed.
        dry_run: Whether the weights are drawn at random.
        measure: Whether the smoke test and the losses are measured here.
        prompts: How many prompts these take.
        new_tokens: How many tokens each output has.
        device: Where models run.
        revision: Branch, tag or commit of the target's hub id.
        trust_remote_code: Whether transformers may run code that comes with the target.

    Raises:
        InputError: The engine is not known, or a number is below 1.
    """

    to: str
    target: str
    drafter: str
    out: Path
    verifier_id: str | None = None
    dtype: str = "auto"
    num_speculative_tokens: int | None = option(None, least=1)
    plan: Path | None = None
    dry_run: bool = False
    measure: bool = True
    prompts: int = option(PROMPTS, least=1)
    new_tokens: int = option(NEW_TOKENS, least=1)
    device: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.to not in ENGINES:
            raise unknown("engine", self.to, ENGINES)
        check(self)
        if self.verifier_id is not None and is_local(self.verifier_id):
            raise InputError(
                f"verifier_id must be a public name of the target, such as org/name, got {self.verifier_id!r}; it is "
                "written into files that others read"
            )

    @property
    def public_target(self) -> str | None:
        """The target's name for files that others read; None if it has none."""
        if self.verifier_id is not None:
            return self.verifier_id
        return None if is_local(self.target) else self.target


def is_local(name: str) -> bool:
    """Whether a name is a path of this machine.

    Example:
        >>> is_local("org/name"), is_local("/models/name"), is_local("./name")
        (False, True, True)
    """
    return Path(name).exists() or name.startswith((".", "~", "/", "\\")) or name.count("/") > 1
