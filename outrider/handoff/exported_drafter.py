"""A drafter as another engine gets it: what its launch command and its notes are made of."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.drafters.exports import Exports

OWN = "$HERE"
"""What stands for the folder of the export in a launch command."""


@dataclass(frozen=True, kw_only=True)
class ExportedDrafter:
    """A drafter as another engine gets it.

    Attributes:
        name: The drafter's name in the catalog.
        method: The engine's name for it.
        exports: Which engines run it.
        target: Public name of the target; None if it has none.
        dtype: Of the weights, as engines write it.
        length: Draft tokens of a step.
        lengths: The same for numbers of requests that run at once, from a plan; empty without one.
        most: Most tokens that the head can guess; None: any number.
        fixed: Whether another length than `most` changes what the head computes.
        first_steps: Of a head with specialists, the draft steps that the first one has learnt, if the engine runs that
            one alone.
        has_files: Whether weights lie in the folder.
        draws: Whether Outrider draws its drafts above temperature 0, instead of proposing tokens.
        same_vocabulary: Whether the draft model has as many tokens as the target.
    """

    name: str
    method: str
    exports: Exports
    target: str | None
    dtype: str
    length: int
    lengths: Mapping[int, int]
    most: int | None = None
    fixed: bool = False
    first_steps: int | None = None
    has_files: bool = True
    draws: bool = True
    same_vocabulary: bool = True

    @property
    def heading(self) -> list[str]:
        """The first lines of a launch script: where it lies, and what the target is."""
        lines = ["#!/bin/sh", "set -eu", 'HERE=$(cd "$(dirname "$0")" && pwd)']
        if self.target is None:
            return [*lines, ': "${TARGET:?set TARGET to the target\'s hub id or folder}"']
        return [*lines, f'TARGET="${{TARGET:-{self.target}}}"']

    def speculative(self) -> dict[str, Any]:
        """vLLM's `speculative_config` for one draft length."""
        draws = self.exports.draws and self.same_vocabulary
        return {
            "method": self.method,
            **({"model": OWN} if self.has_files else {}),
            "num_speculative_tokens": self.length,
            "rejection_sample_method": "standard",
            "draft_sample_method": "probabilistic" if draws else "greedy",
            **self.exports.options,
            **({} if self.same_vocabulary else {"use_heterogeneous_vocab": True}),
        }
