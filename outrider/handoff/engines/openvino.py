"""OpenVINO GenAI: files in its own format, made by optimum, and a pipeline in Python."""

from collections.abc import Sequence

from outrider.handoff.engines.engine import Engine
from outrider.handoff.handed import Handed

SIZES = {"float32": "fp32", "bfloat16": "fp32", "float16": "fp16"}
"""Its names of dtypes. It has none for bfloat16, whose numbers float32 holds exactly."""


def launch(handed: Handed) -> Sequence[str]:
    """Convert both models where that was not done, then decode what the smoke test has."""
    size = f"--weight-format {SIZES.get(handed.dtype, 'fp16')}"
    export = f"optimum-cli export openvino --task text-generation-with-past {size}"
    # A head is code of its own for transformers.
    trusted = "" if handed.method == "draft_model" else " --trust-remote-code"
    return [
        *handed.heading,
        f'[ -d "$HERE/target-openvino" ] || {export} --model "$TARGET" "$HERE/target-openvino"',
        f'[ -d "$HERE/draft-openvino" ] || {export}{trusted} --model "$HERE" "$HERE/draft-openvino"',
        'exec python "$HERE/check.py" --target "$HERE/target-openvino" "$@"',
    ]


def losses(handed: Handed) -> Sequence[str]:
    """What OpenVINO does otherwise."""
    found = [
        "Drafts are greedy, and the verifier follows the draft while the target draws the same tokens. Above "
        "temperature 0 fewer draft tokens are accepted than with Outrider's drawn drafts."
    ]
    if handed.method == "eagle3":
        found.append(
            "The pipeline drafts a chain of num_assistant_tokens tokens, or a greedy tree with branching_factor and "
            "tree_depth."
        )
    if handed.lengths:
        found.append("OpenVINO has one draft length for all batch sizes; that of the smallest number is used.")
    return found


ENGINE = Engine(
    title="OpenVINO GenAI",
    launch=launch,
    losses=losses,
    check="openvino.py",
    tree=lambda handed: handed.method == "eagle3",
)
