"""llama.cpp: files in its own format, made by its own tools, and its server."""

from collections.abc import Sequence

from outrider.handoff.engines.engine import ExportTarget, curl_request
from outrider.handoff.exported_drafter import ExportedDrafter

SIZES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
"""Its names of dtypes; other dtypes become the last."""


def launch(drafter: ExportedDrafter) -> Sequence[str]:
    """Convert both models where that was not done, then the server."""
    size = SIZES.get(drafter.dtype, "f16")
    convert = 'python "$LLAMA_CPP/convert_hf_to_gguf.py"'
    lines = [
        *drafter.heading,
        ': "${LLAMA_CPP:?set LLAMA_CPP to llama.cpp\'s folder}"',
        ': "${TARGET_DIR:?set TARGET_DIR to the target\'s folder, or to its GGUF file}"',
        'case "$TARGET_DIR" in',
        '*.gguf) ln -sf "$TARGET_DIR" "$HERE/target.gguf" ;;',
        f'*) [ -f "$HERE/target.gguf" ] || {convert} "$TARGET_DIR" --outtype {size} --outfile "$HERE/target.gguf" ;;',
        "esac",
    ]
    # The target has its name from the folder here.
    lines = [line for line in lines if "TARGET:" not in line]
    draft = ""
    if drafter.has_files:
        whose = "" if drafter.method == "draft-simple" else ' --target-model-dir "$TARGET_DIR"'
        lines.append(
            f'[ -f "$HERE/draft.gguf" ] || {convert} "$HERE"{whose} --outtype {size} --outfile "$HERE/draft.gguf"'
        )
        draft = '-md "$HERE/draft.gguf" '
    lines.append(
        "# Quantise the target before the last command, if you like: "
        '"$LLAMA_CPP/build/bin/llama-quantize" "$HERE/target.gguf" "$HERE/target-q4.gguf" Q4_K_M'
    )
    lines.append(
        f'exec "$LLAMA_CPP/build/bin/llama-server" -m "$HERE/target.gguf" {draft}--spec-type {drafter.method} '
        f'--spec-draft-n-max {drafter.length} -fa on "$@"'
    )
    return lines


def losses(drafter: ExportedDrafter) -> Sequence[str]:
    """What llama.cpp does otherwise."""
    sentences = [
        "Drafts are greedy chains there. The verifier follows the draft while the target draws the same tokens, so "
        "above temperature 0 fewer draft tokens are accepted than with Outrider's drawn drafts."
    ]
    if drafter.lengths:
        sentences.append(
            "llama.cpp has one draft length for all batch sizes; that of the smallest number of requests is used."
        )
    if not drafter.same_vocabulary:
        sentences.append("The vocabularies differ; llama.cpp allows 128 tokens of difference.")
    return sentences


ENGINE = ExportTarget(
    title="llama.cpp", launch=launch, use=curl_request(8080), losses=losses, check="llama.py", reads_gguf=True
)
