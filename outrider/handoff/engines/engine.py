"""What the export to an engine consists of, beside the checkpoint."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.handoff.exported_drafter import ExportedDrafter


@dataclass(frozen=True, kw_only=True)
class ExportTarget:
    """An engine to which drafters are exported.

    Attributes:
        title: Its name in sentences.
        launch: The lines of the script that starts it.
        use: What asks the started engine, or decodes with the files in a program of one's own.
        language: Of `use`.
        losses: What is lost there, a sentence each.
        check: The file in `outrider/handoff/checks` that decodes with it.
        digests_first: Whether the prompt's own forward says the first token, without a draft.
        serves: Whether the script starts a server.
        reads_gguf: Whether it takes a GGUF file as the target.
        tree: Whether it verifies drafts that branch, for drafters of this method.
    """

    title: str
    launch: Callable[[ExportedDrafter], Sequence[str]]
    use: Callable[[ExportedDrafter], Sequence[str]]
    losses: Callable[[ExportedDrafter], Sequence[str]]
    check: str
    language: str = "sh"
    serves: bool = True
    reads_gguf: bool = False
    digests_first: bool = True
    tree: Callable[[ExportedDrafter], bool] = lambda drafter: False

    @property
    def behind(self) -> str:
        """What arguments behind the script are."""
        if self.serves:
            return "Arguments behind it go to the engine."
        return "It answers a prompt: `--prompt TEXT`, `--new-tokens N`."


def curl_request(port: int) -> Callable[[ExportedDrafter], Sequence[str]]:
    """A request to a server of OpenAI's API on this machine."""
    body = '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64}'
    return lambda drafter: [
        f"curl http://127.0.0.1:{port}/v1/chat/completions -H 'Content-Type: application/json' \\",
        f"  -d '{body}'",
    ]
