"""What a person says of a run of training, beside how heads differ. Imports nothing heavy.

Each field is an option of commands, and the field's words are its help.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from outrider.core.inputs import InputError
from outrider.core.option import CheckedOptions, option
from outrider.learning.options import HeadOptions, loss, size

NOT_OF_PROMPTS = ("regenerate", "held_out", "held_out_split", "capture", "pack", "states", "states_layers")
"""Options of texts that prompts, and texts to prune by, lack."""


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Where the texts come from.

    Attributes:
        data: Text or JSON lines (also .gz), a folder of these, a folder that `datasets` has saved, or a dataset on the
            Hub; may be given several times.
        split: The split of a dataset.
        subset: The configuration of a dataset, also called subset.
        column: What the data calls a field, such as `prompt=question`; may be given several times.
        limit: Read only this many documents.
        regenerate: Learn on the target's answers to the prompts of --data, not on its texts.
        held_out: Texts to watch, best written by the target; may be given several times. By default a twentieth of
            --data.
        held_out_split: The split of --held-out. By default that of --data.
        pack: Let several short texts stand in one row of the forwards of the target and of a draft model, so that no
            padding is computed. No text sees another, and the loss stays as it is.
        states: A folder of hidden states along --data that vLLM has written (its speculative method
            extract_hidden_states), one file per document. It replaces --capture.
        states_layers: The layers in these files, in vLLM's order, such as 2x16x29x32.
        capture: Capture the target's hidden states along --data once, in the folder of the run, and read them in every
            epoch. That pays where texts come more than once.

    Raises:
        InputError: There is no data, or a column is no pair.
    """

    data: tuple[str, ...] = ()
    split: str = "train"
    subset: str | None = None
    column: tuple[str, ...] = ()
    limit: int | None = None
    regenerate: bool = False
    held_out: tuple[str, ...] = ()
    held_out_split: str | None = None
    pack: bool = False
    capture: bool = False
    states: str | None = None
    states_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.data:
            raise InputError("data is missing; name a file, a folder or a dataset with texts")
        if (self.states is None) == bool(self.states_layers) or (self.states is not None and self.capture):
            raise InputError(
                "states and states_layers belong together, without capture: the folder that vLLM wrote, and the layers "
                "that it was told to extract"
            )
        for each in self.column:
            if not all(each.partition("=")):
                raise InputError(f"--column must be a pair such as prompt=question, got {each!r}")

    @property
    def columns(self) -> Mapping[str, str]:
        """What the data calls each field."""
        return {ours: theirs for ours, _, theirs in (each.partition("=") for each in self.column)}


@dataclass(frozen=True, kw_only=True)
class WatchOptions(CheckedOptions):
    """What is measured beside the training.

    Attributes:
        depth: Draft tokens per step whose acceptance is watched.
        watch_temperature: Keep the drafter with the best block efficiency at this temperature, 1 or 0.
        watch_prompts: Decode so many held-out prompts at every measurement, with the drafter as it is then, and log the
            tokens per step. That takes time; 0 decodes nothing.

    Raises:
        InputError: The temperature is neither, or the number is below 0.
    """

    depth: int = 5
    watch_temperature: int = option(1, among=(0, 1))
    watch_prompts: int = option(0, least=0)


@dataclass(frozen=True, kw_only=True)
class DistillOptions(HeadOptions):
    """Train a draft model to guess what a target says. The result is a plain transformers model.

    The same command runs on several processes: `accelerate launch -m outrider train distill ...`.

    Attributes:
        divergence: The loss: fkl, rkl, jsd:beta=0.5, tvd, nla, lk; with top_k=K over the target's likeliest tokens
            alone; ce learns the texts and not the target's rows.
        texts: What to learn on: the fixed texts of --data; the target's answers to their prompts (target); what the
            draft model itself continues them with (on_policy); or mixed:share=0.5 of both.
        positions: Where the draft model sees the tokens: plain; padding, for tables of absolute positions; gaps, for
            rotary positions.
    """

    texts: str = loss("fixed")
    positions: str = loss("plain")


@dataclass(frozen=True, kw_only=True)
class SteerOptions(HeadOptions):
    """Train a draft model together with vectors from the target's hidden states (SD²).

    The result is a transformers model with a steering beside it, for --drafter steered:path=OUT.

    Attributes:
        divergence: The loss, as for distill.
        rank: Rank of the steering; by default a full matrix.
        taps: The target's hidden states that steer, the highest first, such as 30x17x4.
        frozen: Keep the draft model as it is; the steering alone learns.
        positions: Where the draft model sees the tokens: plain; padding, for tables of absolute positions; gaps, for
            rotary positions.
    """

    rank: int | None = size(None, least=1)
    taps: tuple[int, ...] | None = size(None)
    frozen: bool = loss(False)
    positions: str = loss("plain")
