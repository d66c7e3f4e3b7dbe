"""transformers: a draft model as `assistant_model`, or any drafter with Outrider's own code as `custom_generate`."""

from collections.abc import Sequence

from outrider.handoff.engines.engine import Engine
from outrider.handoff.handed import Handed


def launch(handed: Handed) -> Sequence[str]:
    """What decodes the prompts of the smoke test."""
    return [*handed.heading, 'exec python "$HERE/check.py" --target "$TARGET" "$@"']


def losses(handed: Handed) -> Sequence[str]:
    """What transformers does otherwise."""
    if handed.method == "custom_generate":
        return ["Nothing is lost: transformers runs Outrider's own code, which must be installed there."]
    return [
        "transformers decodes one request at a time with an assistant_model. Its draft length is "
        f"{handed.length}, from generation_config.json, whatever the batch."
    ]


ENGINE = Engine(
    title="transformers",
    launch=launch,
    losses=losses,
    check="transformers.py",
    digests_first=False,
    tree=lambda handed: handed.method == "custom_generate",
)
