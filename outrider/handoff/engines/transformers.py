"""transformers: a draft model as `assistant_model`, or any drafter with Outrider's own code as `custom_generate`."""

from collections.abc import Sequence

from outrider.handoff.engines.engine import ExportTarget
from outrider.handoff.exported_drafter import ExportedDrafter


def launch(drafter: ExportedDrafter) -> Sequence[str]:
    """Answer a prompt."""
    return [*drafter.heading, 'exec python "$HERE/engine.py" --target "$TARGET" "$@"']


def use(drafter: ExportedDrafter) -> Sequence[str]:
    """A call of `generate` that drafts."""
    folder = '"path/to/this/folder"'
    if drafter.method == "assistant_model":
        drafts = f"assistant_model=AutoModelForCausalLM.from_pretrained({folder})"
    else:
        spec = f'"{drafter.name}:path=path/to/this/folder"' if drafter.has_files else f'"{drafter.name}"'
        drafts = f"custom_generate={folder}, trust_remote_code=True, drafter={spec}"
    target = drafter.target or "path/to/target"
    return [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("{target}")',
        f'tokenizer = AutoTokenizer.from_pretrained("{target}")',
        'inputs = tokenizer("Once upon a time", return_tensors="pt")',
        f"output = model.generate(**inputs, max_new_tokens=64, {drafts})",
        "print(tokenizer.decode(output[0]))",
    ]


def losses(drafter: ExportedDrafter) -> Sequence[str]:
    """What transformers does otherwise."""
    if drafter.method == "custom_generate":
        return ["Nothing is lost: transformers runs Outrider's own code, which must be installed there."]
    return [
        "transformers decodes one request at a time with an assistant_model. Its draft length is "
        f"{drafter.length}, from generation_config.json, whatever the batch."
    ]


ENGINE = ExportTarget(
    title="transformers",
    launch=launch,
    use=use,
    language="py",
    losses=losses,
    check="transformers.py",
    serves=False,
    reads_gguf=True,
    digests_first=False,
    tree=lambda drafter: drafter.method == "custom_generate",
)
