"""vLLM: its own server, with a `speculative_config`."""

import json
from collections.abc import Sequence

from outrider.handoff.engines.engine import ExportTarget, curl_request
from outrider.handoff.exported_drafter import ExportedDrafter
from outrider.plan.exports import batch_table

V1_ONLY = ("medusa", "mlp_speculator")
"""Methods that its older model runner alone knows."""


def launch(drafter: ExportedDrafter) -> Sequence[str]:
    """The server, with a table of draft lengths where a plan says them."""
    config = drafter.speculative()
    if drafter.lengths:
        config["num_speculative_tokens_per_batch_size"] = batch_table(drafter.lengths)
    command = 'exec vllm serve "$TARGET" --dtype ' + drafter.dtype + ' --speculative-config "$SPECULATIVE" "$@"'
    return [*drafter.heading, "SPECULATIVE=$(cat <<JSON", json.dumps(config), "JSON", ")", command]


def losses(drafter: ExportedDrafter) -> Sequence[str]:
    """What vLLM does otherwise."""
    sentences = [
        "The verifier becomes vLLM's `standard` (token by token). Its `block` is Outrider's `block`, and its newer "
        "model runner alone has it: set rejection_sample_method to block there. The older runner takes block for "
        "standard without a word, and then drafts greedily."
    ]
    if drafter.draws and drafter.speculative()["draft_sample_method"] == "greedy":
        sentences.append(
            "Drafts are greedy there. Above temperature 0, fewer draft tokens are accepted than with Outrider's drawn "
            "drafts. The outputs keep their law."
        )
    if drafter.exports.newer_runner:
        sentences.append(f"{drafter.name} needs vLLM's newer model runner, and so a GPU; its CPU build refuses it.")
    if drafter.method in V1_ONLY or drafter.exports.options:
        sentences.append(
            f"vLLM runs {drafter.name} heads with its older model runner, which verifies by `standard` alone."
        )
    if drafter.lengths:
        sentences.append("vLLM ignores draft lengths by batch size under data parallelism.")
    others = {drafter.length, *drafter.lengths.values()} - {0, drafter.most}
    if drafter.fixed and drafter.most is not None and others:
        sentences.append(
            f"The head learnt blocks that guess {drafter.most} tokens. vLLM makes blocks of other lengths, which "
            "changes what their positions see, so fewer tokens are accepted than measured here."
        )
    if not drafter.same_vocabulary:
        sentences.append("The vocabularies differ, so vLLM drafts greedily and translates tokens.")
    return sentences


ENGINE = ExportTarget(title="vLLM", launch=launch, use=curl_request(8000), losses=losses, check="vllm.py")
