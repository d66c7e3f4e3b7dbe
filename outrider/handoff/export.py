"""`outrider export`: a drafter becomes a folder that another engine loads, with the command that starts it."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.core import files
from outrider.core.destination import check_free, locked
from outrider.core.inputs import InputError
from outrider.drafters.traits import Traits
from outrider.handoff.engines import KNOWN
from outrider.handoff.exported_drafter import ExportedDrafter
from outrider.handoff.lengths import PlanFile
from outrider.handoff.losses import predicted
from outrider.handoff.order import ExportRequest, is_local
from outrider.handoff.smoke import CHECK, EXPECTED, engine_of, expected, scripts
from outrider.handoff.source import DEPTH, Source, open_source
from outrider.heads.head import Head
from outrider.integrate.generate import write_custom_generate
from outrider.lm.hf.checkpoint import CONFIG, INDICES, write_head
from outrider.lm.hf.tokenizer_files import write_tokenizer

LAUNCH, README = "launch.sh", "README.md"
WEIGHTS_AT_ONCE = "100TB"
"""Larger than any file, so that there is one."""
PLACE = "name_or_path"
"""Ends of the keys of configs that hold a path of this machine or a hub id."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
"""Ends of the names of files with weights."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written.

    Attributes:
        order: What was wanted.
        drafter: The drafter as the engine gets it.
        command: The lines of the launch script.
        losses: What is lost, a sentence each.
        expected: The content of `expected.json`.
    """

    order: ExportRequest
    drafter: ExportedDrafter
    command: Sequence[str]
    losses: Sequence[str]
    expected: Mapping[str, Any]

    def values(self) -> dict[str, Any]:
        """The same as values of JSON."""
        measured = {key: self.expected[key] for key in ("tokens_per_step", "acceptance_rate") if key in self.expected}
        return {
            "out": str(self.order.out),
            "engine": self.order.to,
            "drafter": self.drafter.name,
            "method": self.drafter.method,
            "num_speculative_tokens": self.drafter.length,
            "num_speculative_tokens_per_requests": dict(self.drafter.lengths),
            "launch": list(self.command),
            "losses": list(self.losses),
            "untrained": self.order.dry_run,
            **measured,
        }


def export(order: ExportRequest) -> Exported:
    """Write a drafter for another engine. The folder appears when it is complete.

    Raises:
        InputError: The engine cannot load the drafter, the drafter does not fit the target, or the folder cannot be
            written. Then nothing is left behind.
    """
    check_free(order.out)
    with locked(order.out.parent / f".{order.out.name}.lock", order.out):
        plan = None if order.plan is None else PlanFile.read(order.plan, order.drafter)
        source = open_source(order)
        drafter = exported_drafter(order, source, plan)
        with files.written(order.out):
            order.out.parent.mkdir(parents=True, exist_ok=True)
            with files.replaced(order.out) as fresh:
                fresh.mkdir()
                exported = _filled(order, source, drafter, plan, fresh)
                # Another program may have written there meanwhile.
                check_free(order.out)
    return exported


def exported_drafter(order: ExportRequest, source: Source, plan: PlanFile | None) -> ExportedDrafter:
    """The drafter as the engine gets it. Raises InputError for a draft length that the head does not have."""
    most = order.num_speculative_tokens or source.most
    lengths = {} if plan is None else {b: min(n, most or n) for b, n in plan.lengths.items()}
    if lengths and not any(lengths.values()):
        raise InputError(f"the plan {order.plan} advises not to speculate with {source.name}; leave out --plan")
    planned = next((length for length in lengths.values() if length), None)
    first_steps = None if source.head is None or order.to == "transformers" else source.head.first_steps
    length = order.num_speculative_tokens or planned or source.most or first_steps or DEPTH
    if source.most is not None and length > source.most:
        raise InputError(
            f"the {source.name} head guesses {source.most} tokens, and --num-speculative-tokens is {length}; give at "
            f"most {source.most}"
        )
    method = source.exports.method(order.to)
    if method is None:
        raise InputError(f"{order.to} cannot load {source.name}")
    return ExportedDrafter(
        name=source.name,
        method=method,
        exports=source.exports,
        target=order.public_target,
        dtype=str(source.target.dtype).removeprefix("torch."),
        length=length if order.to != "vllm" or not lengths else max(length, *lengths.values()),
        lengths=lengths,
        most=source.most,
        fixed=_is_fixed(source.head),
        first_steps=first_steps,
        has_files=source.exports.has_files,
        draws=Traits.of(source.kind).rows == "sampled",
        same_vocabulary=source.same_vocabulary,
    )


def _is_fixed(head: Head | None) -> bool:
    """Whether positions of a block see later ones, so that its length changes what all of them compute."""
    config = getattr(head, "config", None)
    sights = getattr(config, "sights", None)
    return sights is not None and not (sights and all(sight.causal for sight in sights))


def _filled(
    order: ExportRequest, source: Source, drafter: ExportedDrafter, plan: PlanFile | None, folder: Path
) -> Exported:
    """All files of the folder."""
    if source.exports.has_files:
        write_checkpoint(order, source, drafter, folder)
    if drafter.method == "custom_generate":
        write_custom_generate(folder, length=f"fixed:{drafter.length}")
    engine = engine_of(order, source, folder, drafter) if order.measure else None
    record = expected(order, drafter, engine)
    losses = [*KNOWN[order.to].losses(drafter), *(plan.costs() if plan else predicted(order, drafter, engine))]
    if source.head is not None and drafter.first_steps is not None:
        losses.append(
            f"{KNOWN[order.to].title} runs the first of {source.head.num_specialists} specialists alone, as a head of "
            f"the kind {drafter.method}. It learnt {drafter.first_steps} draft step{'s' * (drafter.first_steps > 1)}; "
            "longer drafts work, and their later tokens are accepted less."
        )
    losses += [f"{name} of the drafter has no counterpart there." for name in source.unused]
    command = list(KNOWN[order.to].launch(drafter))
    exported = Exported(order=order, drafter=drafter, command=command, losses=losses, expected=record)
    written = {
        **scripts(order.to, measured=engine is not None),
        EXPECTED: json.dumps(record) + "\n",
        LAUNCH: "\n".join(command) + "\n",
        README: readme(exported),
    }
    for name, text in written.items():
        (folder / name).write_text(text, encoding="utf-8")
    os.chmod(folder / LAUNCH, 0o755)
    return exported


def write_checkpoint(order: ExportRequest, source: Source, drafter: ExportedDrafter, folder: Path) -> None:
    """Write the weights in the engine's layout: one file, and no path of this machine."""
    dtype, public = source.target.dtype, drafter.target or Path(order.target).name
    if source.head is not None:
        if order.to != "transformers":
            config, tensors = source.head.exported(order.to, source.shape, dtype, public)
        elif source.checkpoint is None:
            config, tensors = source.head.record(source.shape, dtype, public)
        else:
            # Outrider reads it there too, so it stays in the layout that it has.
            config, tensors = dict(source.checkpoint.config), dict(source.checkpoint.tensors())
            _copy_beside(Path(source.checkpoint.path), folder)
        write_head(folder, _named(config, source, drafter, public), tensors, dtype)
        return
    draft = source.draft
    if draft is None:
        # A drafter of Outrider's own that is neither: transformers runs Outrider, which reads the folder.
        _copy_beside(Path(source.place), folder, weights=True)
        return
    if order.to == "transformers":
        draft.generation_config.num_assistant_tokens = drafter.length
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        # Stopping early would be another length than the one that was measured.
        draft.generation_config.assistant_confidence_threshold = 0.0
    draft.save_pretrained(folder, max_shard_size=WEIGHTS_AT_ONCE)
    tokenizer = source.draft_tokenizer or source.tokenizer
    if tokenizer is not None:
        write_tokenizer(tokenizer, folder)
    for file in folder.glob("*.json"):
        _cleaned(file)


def _named(config: dict[str, Any], source: Source, drafter: ExportedDrafter, public: str) -> dict[str, Any]:
    """A config with the draft length and the target where its layout has a place for them, and without paths."""
    kept = _without_paths(config)
    inner = kept.get("speculators_config")
    if not isinstance(inner, dict):
        return kept
    first, *others = inner.get("proposal_methods") or [{}]
    methods = [{**first, "speculative_tokens": drafter.length}, *others]
    verifier = {"name_or_path": public, "architectures": [type(source.target).__name__]}
    return {**kept, "speculators_config": {**inner, "proposal_methods": methods, "verifier": verifier}}


def _cleaned(file: Path) -> None:
    """Take paths of this machine out of a JSON file, and add the keys that older versions of transformers read."""
    content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        return
    content = _without_paths(content)
    if file.name == CONFIG:
        rope = content.get("rope_parameters")
        if isinstance(rope, dict) and rope.get("rope_type", "default") == "default" and "rope_theta" in rope:
            content |= {"rope_theta": rope["rope_theta"], "rope_scaling": None}
        if "dtype" in content:
            content["torch_dtype"] = content["dtype"]
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _without_paths(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without the paths of this machine at its top."""
    return {key: value for key, value in config.items() if not (key.endswith(PLACE) and is_local(str(value)))}


def _copy_beside(place: Path, folder: Path, *, weights: bool = False) -> None:
    """Copy the files of a drafter, without its training folder.

    Args:
        weights: Whether its config and its weights are among them.
    """
    if not place.is_dir():
        return
    for each in sorted(place.iterdir()):
        is_of_model = each.name == CONFIG or each.suffix in WEIGHTS or each.name in INDICES
        if each.is_file() and not each.name.startswith(".") and (weights or not is_of_model):
            shutil.copyfile(each, folder / each.name)
            if each.suffix == ".json":
                _cleaned(folder / each.name)


def readme(exported: Exported) -> str:
    """The page beside the files."""
    engine, drafter, expected = KNOWN[exported.order.to], exported.drafter, exported.expected
    target = f"`{drafter.target}`" if drafter.target else "the target that it was trained for"
    state = (
        "Its weights are drawn at random: it tries the path, and drafts nothing useful."
        if exported.order.dry_run
        else ""
    )
    lines = [
        f"# A drafter for {engine.title}",
        "",
        f"A drafter of the kind `{drafter.name}` for {target}, written by Outrider. {state}".rstrip(),
        "",
        "## Start",
        "",
        "```sh",
        *exported.command[1:],
        "```",
        "",
        f"`sh {LAUNCH}` runs this. {engine.behind}",
        "",
        "## Use",
        "",
        f"```{engine.language}",
        *engine.use(drafter),
        "```",
        "",
    ]
    if "tokens_per_step" in expected:
        lines += [
            "## Check",
            "",
            f"`python {CHECK} --target TARGET`, in the environment of {engine.title}, compares tokens and tokens per "
            f"step with `{EXPECTED}`." + (" `--url` asks a server that runs." if engine.serves else ""),
            "",
            f"Outrider measured {expected['tokens_per_step']:.2f} tokens per step at temperature 0 with drafts of "
            f"{drafter.length} tokens; {expected['acceptance_rate']:.0%} of the draft tokens were accepted.",
            "",
        ]
    lines += ["## What is lost", "", *(f"- {line}" for line in exported.losses), ""]
    return "\n".join(lines)
