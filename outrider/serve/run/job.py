"""What a service is asked for, and what it brings: one job per output, one event per step."""

from dataclasses import dataclass, field

from outrider.engine.generation import Generation
from outrider.engine.output import Times, Update


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


@dataclass(frozen=True, kw_only=True)
class OutputTask:
    """One output to make.

    Attributes:
        id: A name that no running job has.
        prompt: Token ids.
        options: What is asked of the output. The other fields of a job override it.
        priority: Of waiting jobs, those with the lowest number get slots first.
        speculation: How its drafts differ from the server's.
        include_stop: Let the text end behind the stop string that ends it, and not before.
        deadline: Seconds of `time.monotonic` after which the job is cancelled; by default the service's
            `request_timeout` from now.
        owner: Whose job it is, for `max_concurrent_per_key`; None counts for nobody.
    """

    id: str
    prompt: tuple[int, ...]
    options: Generation = field(default_factory=Generation)
    priority: int = 0
    speculation: RequestSpeculation = field(default_factory=RequestSpeculation)
    include_stop: bool = False
    deadline: float | None = None
    owner: str | None = None


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """What a step brought for a job.

    Attributes:
        update: New tokens and text; the last event's update has an output.
        times: When the job came, got its slot and emitted tokens, in seconds of `time.monotonic`.
        stop_reason: On the last event: the stop string that ended the output, or the token of `stop_token_ids`; None
            for the model's own end tokens, and where nothing stopped it.
    """

    update: Update
    times: Times
    stop_reason: str | int | None = None
