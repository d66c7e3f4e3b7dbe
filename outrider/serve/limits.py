"""The limits of a server: how much it queues, how long it waits, how large a request may be."""

from dataclasses import dataclass

from outrider.core.option import CheckedOptions, option


@dataclass(frozen=True, kw_only=True)
class Limits(CheckedOptions):
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

    max_queue: int = option(256, least=0)
    max_queue_tokens: int | None = option(None, least=0)
    max_concurrent_per_key: int | None = option(None, least=0)
    request_timeout: float = option(600.0, least=0, finite=False)
    stall_seconds: float = option(120.0, least=0, finite=False)
    slow_client_seconds: float = option(30.0, least=0, finite=False)
    unsent_bytes: int = option(2**20, least=0)
    drain_seconds: float = option(30.0, least=0, finite=False)
    max_outputs: int = option(16, least=0)
    max_prompts: int = option(64, least=0)
    max_stops: int = option(16, least=0)
    max_stop_length: int = option(256, least=0)
    max_logit_bias: int = option(1024, least=0)
    max_logprobs: int = option(20, least=0)
    max_tools: int = option(128, least=0)
    max_body_bytes: int = option(8 * 2**20, least=0)
    max_header_bytes: int = option(64 * 2**10, least=0)
    header_seconds: float = option(30.0, least=0, finite=False)
    max_json_depth: int = option(64, least=0)
    max_schema_bytes: int = option(64 * 2**10, least=0)
    max_schema_depth: int = option(32, least=0)
    compile_seconds: float = option(2.0, least=0, finite=False)
