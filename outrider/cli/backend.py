"""What makes the outputs of a command: an engine in this process, or a server at a URL, which may be a vLLM."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol, runtime_checkable

from outrider.cli.remote import RemoteOptions
from outrider.cli.request import RequestOptions
from outrider.cli.supported import ENGINE, URL, VLLM, BackendSupport
from outrider.core.types import Sampling
from outrider.engine.engine import Engine, Sink
from outrider.engine.output import Output, Update
from outrider.engine.prompts import Prompt
from outrider.engine.requests import nth
from outrider.serve.vllm.options import EngineChoice, EngineOptions
from outrider.setup import Setup


@runtime_checkable
class Backend(Protocol):
    """What makes outputs. Requests run together; each step returns what is new of them."""

    @property
    def engine(self) -> Engine | None:
        """The engine, where it is in this process."""
        ...

    @property
    def sampling(self) -> Sampling:
        """How outputs are drawn where a request does not say, as far as that is known."""
        ...

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        ...

    @property
    def num_unread_tokens(self) -> int:
        """Prompt tokens that are still to be read, as far as that is known."""
        ...

    def add(
        self, prompt: Prompt, request: RequestOptions, *, id: str, sample: int = 0, logprobs: int | None = None
    ) -> None:
        """Begin a request. Raises InputError if it cannot be run.

        Args:
            id: A name that no running request has.
            sample: Number among the outputs of the prompt; each has draws of its own.
            logprobs: Number of likeliest tokens to record besides the emitted one; None records nothing.
        """
        ...

    def step(self, sink: Sink | None = None) -> list[Update]:
        """Wait a while for what is new. A request that fails ends with an error.

        Args:
            sink: Called with each step of a request, where steps are known.
        """
        ...

    def cancel(self, id: str) -> Output | None:
        """End a request now. Returns its output so far, or None if there is no such request."""
        ...


class EngineBackend:
    """An engine in this process."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @property
    def sampling(self) -> Sampling:
        """The engine's own settings."""
        return self.engine.sampling

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return self.engine.busy

    @property
    def num_unread_tokens(self) -> int:
        """Prompt tokens that the target has not run on yet."""
        return self.engine.num_unread_tokens

    def add(
        self, prompt: Prompt, request: RequestOptions, *, id: str, sample: int = 0, logprobs: int | None = None
    ) -> None:
        """Queue a request."""
        options = replace(request.generation(self.sampling), logprobs=logprobs)
        self.engine.add(prompt, id=id, options=options, sampling=nth(options.sampling, sample))

    def step(self, sink: Sink | None = None) -> list[Update]:
        """Make a step of the engine."""
        return self.engine.step(sink=sink)

    def cancel(self, id: str) -> Output | None:
        """End a request now. Returns its output so far, or None if there is no such request."""
        return self.engine.cancel(id)


def support_of(engine: EngineChoice, remote: RemoteOptions | None = None) -> BackendSupport:
    """What the backend that was chosen can use. Raises InputError where two were chosen."""
    if remote is not None and remote.url is not None:
        URL.check(engine)
        return URL
    return VLLM if engine.is_vllm else ENGINE


@contextmanager
def opened_backend(
    setup: Setup,
    request: RequestOptions,
    engine: EngineOptions,
    remote: RemoteOptions,
    *,
    divided: bool = False,
    reasoning: Callable[[str], None] = lambda text: None,
) -> Iterator[Backend]:
    """The backend that was chosen. What `support_of` tells is to be checked before.

    Args:
        request: The options of the requests, as far as they are known.
        divided: Whether the command can run in several processes that hold one target.
        reasoning: Called with what a server tells of its reasoning, as it comes.
    """
    from outrider.cli.opened import opened
    from outrider.cli.url_backend import UrlBackend

    if remote.url is not None:
        server = remote.remote()
        yield UrlBackend(server, str(remote.card(server)["id"]), reasoning=reasoning)
    elif engine.is_vllm:
        process = engine.process(setup, engine.vllm_python)
        try:
            process.check(request.body())
            with process:
                name = str(process.remote.models()[0]["id"])
                yield UrlBackend(process.remote, name, check=process.check, reasoning=reasoning)
        finally:
            process.stop()
    else:
        yield EngineBackend(opened(setup, divided=divided))
