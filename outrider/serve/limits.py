"""The limits of a server: how much it queues, how long it waits, how large a request may be."""

from dataclasses import dataclass, fields

from outrider.core.inputs import InputError


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a server.

    Attributes:
        max_queue: Most requests that wait for a slot; further ones are refused.
        max_queue_tokens: Most prompt tokens that wait for a slot; by default eight contexts. A single request is never
            refused for its size.
        max_concurrent_per_key: Most requests of one API key at once, waiting ones included; None sets no limit.
        request_timeout: Seconds from arrival after which a request is cancelled.
        stall_seconds: Seconds without a sign of life after which the engine's thread counts as stalled. The longest
            forward must take less.
        slow_client_seconds: Seconds for which a client may leave more than `unsent_bytes` unread before its request is
            cancelled.
        unsent_bytes: Most bytes, roughly, that may wait for a client.
        drain_seconds: Seconds that running requests get to end when the server stops.
        max_outputs: Most outputs of one prompt (`n`).
        max_prompts: Most prompts of one call.
        max_stops: Most stop strings of a request.
        max_stop_length: Most characters of a stop string.
        max_logit_bias: Most entries of `logit_bias`.
        max_logprobs: Most log-probabilities at each position.
        max_tools: Most tools of a request.
        max_body_bytes: Most bytes of a request's body.
        max_header_bytes: Most bytes of a request's headers.
        header_seconds: Seconds that a client may take to send them, from the opening of its connection.
        max_json_depth: Deepest nesting of a request's JSON.
        max_schema_bytes: Most bytes of a JSON schema, a pattern or a grammar.
        max_schema_depth: Deepest nesting of a JSON schema.
        compile_seconds: CPU seconds after which compiling a grammar is given up.

    Raises:
        InputError: A limit is negative.

    Example:
        >>> Limits(max_queue=-1)
        Traceback (most recent call last):
        ...
        outrider.core.inputs.InputError: max_queue must be >= 0, got -1
    """

    max_queue: int = 256
    max_queue_tokens: int | None = None
    max_concurrent_per_key: int | None = None
    request_timeout: float = 600.0
    stall_seconds: float = 120.0
    slow_client_seconds: float = 30.0
    unsent_bytes: int = 2**20
    drain_seconds: float = 30.0
    max_outputs: int = 16
    max_prompts: int = 64
    max_stops: int = 16
    max_stop_length: int = 256
    max_logit_bias: int = 1024
    max_logprobs: int = 20
    max_tools: int = 128
    max_body_bytes: int = 8 * 2**20
    max_header_bytes: int = 64 * 2**10
    header_seconds: float = 30.0
    max_json_depth: int = 64
    max_schema_bytes: int = 64 * 2**10
    max_schema_depth: int = 32
    compile_seconds: float = 2.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None and not value >= 0:
                raise InputError(f"{each.name} must be >= 0, got {value}")
