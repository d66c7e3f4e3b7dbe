"""OpenVINO GenAI: files in its own format, made by optimum, and a pipeline in Python."""

from collections.abc import Sequence

from outrider.handoff.engines.engine import ExportTarget
from outrider.handoff.exported_drafter import ExportedDrafter


def launch(drafter: ExportedDrafter) -> Sequence[str]:
    """Convert both models where that was not done, then answer a prompt."""
    return [*drafter.heading, 'exec python "$HERE/engine.py" --target "$TARGET" "$@"']


def use(drafter: ExportedDrafter) -> Sequence[str]:
    """A pipeline over the files that the script has made."""
    return [
        "import openvino_genai as genai",
        "",
        'draft = genai.draft_model("draft-openvino", "CPU")',
        'pipeline = genai.LLMPipeline("target-openvino", "CPU", draft_model=draft)',
        f'print(pipeline.generate("Hello", max_new_tokens=64, num_assistant_tokens={drafter.length}))',
    ]


def losses(drafter: ExportedDrafter) -> Sequence[str]:
    """What OpenVINO does otherwise."""
    sentences = [
        "Drafts are greedy, and the verifier follows the draft while the target draws the same tokens. Above "
        "temperature 0 fewer draft tokens are accepted than with Outrider's drawn drafts."
    ]
    if drafter.dtype == "bfloat16":
        sentences.append(
            "optimum writes no bfloat16, so the weights become float16: those below 0.00006 lose bits, all others are "
            "the same numbers."
        )
    if drafter.method == "eagle3":
        sentences.append(
            "The pipeline drafts a chain of num_assistant_tokens tokens, or a greedy tree with branching_factor and "
            "tree_depth."
        )
    if drafter.lengths:
        sentences.append("OpenVINO has one draft length for all batch sizes; that of the smallest number is used.")
    return sentences


ENGINE = ExportTarget(
    title="OpenVINO GenAI",
    launch=launch,
    use=use,
    language="py",
    losses=losses,
    check="openvino.py",
    serves=False,
    tree=lambda drafter: drafter.method == "eagle3",
)
