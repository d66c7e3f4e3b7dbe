"""What a service is asked for: one task for each output."""

from dataclasses import dataclass, field

from outrider.engine.generation import Generation


@dataclass(frozen=True, kw_only=True)
class RequestSpeculation:
    """How the drafts of one request differ from those that the server was started for. None changes nothing.

    Attributes:
        enabled: False decodes the request plainly.
        max_tokens: Deepest draft of a step; 0 drafts nothing. What the length policy chooses stays below it.
        drafter: The name of a drafter of the server's list.
        verifier: The name of the server's verifier. All requests of a step share one, so another name is refused.
        tree: The name of the server's tree, likewise.
        max_context: Longest context, in tokens, behind which a token is drafted.
    """

    enabled: bool | None = None
    max_tokens: int | None = None
    drafter: str | None = None
    verifier: str | None = None
    tree: str | None = None
    max_context: int | None = None

    @property
    def off(self) -> bool:
        """Whether nothing is drafted."""
        return self.enabled is False or self.max_tokens == 0


@dataclass(frozen=True, kw_only=True)
class OutputTask:
    """One output to make.

    Attributes:
        id: A name that no running task has.
        prompt: Token ids.
        options: What is asked of the output.
        speculation: How its drafts differ from the server's.
        deadline: Seconds of `time.monotonic` after which the task is cancelled; by default the service's
            `request_timeout` from now.
        owner: The key that it came with, for `max_concurrent_per_key`, and because texts of other keys are not drafted;
            None counts for nobody.
    """

    id: str
    prompt: tuple[int, ...]
    options: Generation = field(default_factory=Generation)
    speculation: RequestSpeculation = field(default_factory=RequestSpeculation)
    deadline: float | None = None
    owner: str | None = None
