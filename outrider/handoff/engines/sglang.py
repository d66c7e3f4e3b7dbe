"""SGLang: its own server, with flags."""

from collections.abc import Sequence

from outrider.handoff.engines.engine import ExportTarget, curl_request
from outrider.handoff.handed import Handed
from outrider.plan.exports import sglang_flags

BLOCKS = ("DFLASH", "DSPARK")
"""Algorithms whose drafts are blocks."""
TREES = ("EAGLE", "EAGLE3")
"""Algorithms whose drafts may branch."""


def launch(handed: Handed) -> Sequence[str]:
    """The server. It has one draft length for all batch sizes."""
    length = (handed.most if handed.method in BLOCKS else None) or handed.length
    flags = sglang_flags(handed.method, length, '"$HERE"' if handed.has_files else None)
    command = 'exec python -m sglang.launch_server --model-path "$TARGET" --dtype ' + handed.dtype
    return [*handed.heading, f'{command} {" ".join(flags)} "$@"']


def losses(handed: Handed) -> Sequence[str]:
    """What SGLang does otherwise."""
    sentences = [
        "The verifier becomes SGLang's: it draws from the target and follows the draft while both agree. With "
        "--speculative-use-rejection-sampling it accepts by the draft's probabilities, for chains."
    ]
    if handed.method in TREES:
        sentences.append(
            "A chain is launched. --speculative-eagle-topk above 1 makes drafts branch, and turns SGLang's overlapped "
            "scheduling off."
        )
    if handed.lengths:
        sentences.append(
            "SGLang has one draft length for all batch sizes; that of the smallest number of requests is used."
        )
    if not handed.same_vocabulary:
        sentences.append("The draft model has another number of tokens than the target, and SGLang wants the same.")
    return sentences


ENGINE = ExportTarget(
    title="SGLang",
    launch=launch,
    use=curl_request(30000),
    losses=losses,
    check="sglang.py",
    tree=lambda handed: handed.method in TREES,
)
