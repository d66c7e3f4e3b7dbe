"""Why a job gets no result: the errors of a service, with the HTTP status that says so."""


class JobError(Exception):
    """A job that was refused, or that ended without a result.

    Attributes:
        status: HTTP status.
        kind: OpenAI's type of error, such as `server_error`.
        code: A short name of the reason.
        message: A sentence for the client.
        retry_after: Seconds after which another try makes sense; None if that is not known.
    """

    def __init__(
        self, message: str, *, status: int, kind: str = "server_error", code: str, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.code = code
        self.message = message
        self.retry_after = retry_after


class QueueFull(JobError):
    """Too many requests, or too many tokens, wait already."""

    def __init__(self, message: str, *, code: str = "queue_full", retry_after: float | None = None) -> None:
        super().__init__(message, status=429, kind="rate_limit_error", code=code, retry_after=retry_after)


class Draining(JobError):
    """The server is stopping."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down and takes no more requests", status=503, code="draining")


class EngineDead(JobError):
    """The engine's thread has ended by an error.

    Args:
        status: 500 for a job that ran, 503 for a new one.
    """

    def __init__(self, *, status: int = 503) -> None:
        super().__init__("the engine has stopped after an internal error", status=status, code="engine_dead")


class TimedOut(JobError):
    """The deadline of the job passed."""

    def __init__(self) -> None:
        super().__init__(
            "the request ran out of time and was cancelled", status=408, kind="timeout_error", code="request_timeout"
        )


class SlowClient(JobError):
    """The client left too much unread for too long."""

    def __init__(self) -> None:
        super().__init__(
            "the client read too slowly and its request was cancelled",
            status=408,
            kind="timeout_error",
            code="slow_client",
        )


def of_request(error: Exception | None, id: str) -> JobError:
    """The error of a job that the engine ended. The engine's own words stay in the log, because they may hold paths."""
    kept = type(error).__name__ if error is not None else "error"
    return JobError(f"request {id} failed with an internal error ({kept})", status=500, code="internal_error")
