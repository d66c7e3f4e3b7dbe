"""SGLang: its own server, with flags."""

from collections.abc import Sequence

from outrider.handoff.engines.engine import ExportTarget, curl_request
from outrider.handoff.exported_drafter import ExportedDrafter
from outrider.plan.exports import sglang_flags

BLOCKS = ("DFLASH", "DSPARK")
"""Algorithms whose drafts are blocks."""
TREES = ("EAGLE", "EAGLE3")
"""Algorithms whose drafts may branch."""


def launch(drafter: ExportedDrafter) -> Sequence[str]:
    """The server. It has one draft length for all batch sizes."""
    length = (drafter.most if drafter.method in BLOCKS else None) or drafter.length
    flags = sglang_flags(drafter.method, length, '"$HERE"' if drafter.has_files else None)
    command = 'exec python -m sglang.launch_server --model-path "$TARGET" --dtype ' + drafter.dtype
    return [*drafter.heading, f'{command} {" ".join(flags)} "$@"']


def losses(drafter: ExportedDrafter) -> Sequence[str]:
    """What SGLang does otherwise."""
    sentences = [
        "The verifier becomes SGLang's: it draws from the target and follows the draft while both agree. With "
        "--speculative-use-rejection-sampling it accepts by the draft's probabilities, for chains."
    ]
    if drafter.method in TREES:
        sentences.append(
            "A chain is launched. --speculative-eagle-topk above 1 makes drafts branch, and turns SGLang's overlapped "
            "scheduling off."
        )
    if drafter.lengths:
        sentences.append(
            "SGLang has one draft length for all batch sizes; that of the smallest number of requests is used."
        )
    if not drafter.same_vocabulary:
        sentences.append("The draft model has another number of tokens than the target, and SGLang wants the same.")
    return sentences


ENGINE = ExportTarget(
    title="SGLang",
    launch=launch,
    use=curl_request(30000),
    losses=losses,
    check="sglang.py",
    tree=lambda drafter: drafter.method in TREES,
)
