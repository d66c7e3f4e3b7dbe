"""An engine as a service: tasks in, updates out, with a bounded queue, deadlines and an orderly end."""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from outrider import catalog
from outrider.constraints.grammar import Grammar
from outrider.core.constraint import Constraint
from outrider.core.inputs import InputError, unknown, whole
from outrider.core.types import Sampling
from outrider.drafters.none import NoDrafter
from outrider.drafters.protocol import Drafter
from outrider.engine.engine import Engine
from outrider.engine.generation import Generation
from outrider.engine.output import PromptLogprobs
from outrider.engine.prompts import NO_TOKENIZER, encode_text
from outrider.engine.requests import bound
from outrider.host.threads import release_threads
from outrider.serve.errors import Draining, EngineDead, QueueFull, ServeError
from outrider.serve.limits import Limits
from outrider.serve.observe.metrics import ServerMetrics
from outrider.serve.run.cpu_limit import Limited
from outrider.serve.run.outputs import OutputTask, RequestSpeculation, Ticket
from outrider.serve.run.renewal import Renewal
from outrider.serve.run.slots import QueueSlots
from outrider.serve.run.templates import ChatPrompt, encode_chat
from outrider.serve.run.worker import Worker

State = Literal["ready", "draining", "stalled", "engine_dead"]
LEARNS = "the drafter of this server learns from its requests, so nobody else replaces it"
LOOK = 0.02
"""Seconds between two looks at whether all tasks have ended."""
SHORT = 2000
"""Most characters of a text that is encoded on the event loop. It takes less time than to wake another thread."""


class Service:
    """An engine that serves tasks from event loops. One thread calls the engine; nobody else may.

    Attributes:
        engine: The engine.
        names: The names of the model; the first is its own.
        limits: Its limits.
        metrics: Its numbers so far.
        slots: Who waits and who runs.
        drafter: The name of the engine's own drafter.
        drafters: The drafters that a task may name, the engine's own among them.
        started: When it was made, in seconds since 1970.

    Args:
        engine: The engine; from now on nobody else calls it.
        names: The names of the model, at least one.
        drafters: Drafters that tasks may name, beside the engine's own, by their names.
        drafter: A name for the engine's own drafter; by default its name in the catalog, or that of its class.
        renewal: Loads drafters anew with weights that clients send; None refuses them.
        learns: Whether the engine's own drafter gets new weights by itself, so that its name means the newest ones.

    Raises:
        InputError: There is no name, or a drafter does not fit the engine's other parts.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        names: Sequence[str],
        limits: Limits | None = None,
        drafters: Mapping[str, Drafter] | None = None,
        drafter: str | None = None,
        renewal: Renewal | None = None,
        learns: bool = False,
    ) -> None:
        if not names:
            raise InputError("a service needs at least one name for its model")
        self.engine = engine
        self.names = tuple(names)
        self.limits = limits or Limits()
        self.renewal = renewal
        self._learns = learns
        self.started = time.time()
        parts = engine.parts
        self.drafter = drafter or catalog.name_of(parts.drafter)
        self.drafters = {**(drafters or {}), self.drafter: parts.drafter}
        for name, offered in self.drafters.items():
            if (reason := engine.refuses(offered)) is not None:
                raise InputError(f"drafter {name!r} cannot be offered: {reason}")
        most = self.limits.max_queue_tokens
        self.slots = QueueSlots(
            self.limits,
            max_slots=engine.max_slots,
            max_tokens=8 * parts.target.max_context if most is None else most,
        )
        depth = parts.length.limit(parts.length.open())
        self.metrics = ServerMetrics(model=names[0], max_context=parts.target.max_context, depth=depth)
        slots = self.slots
        self.metrics.watch_queue(lambda: slots.running, lambda: slots.waiting, lambda: slots.waiting_tokens)
        room = {"num_slots": str(engine.max_slots), "max_model_len": str(parts.target.max_context)}
        self.metrics.watch_engine(room, lambda: engine.parts.experience.cost_drift)
        self._worker = Worker(engine, slots=self.slots, metrics=self.metrics)
        self._plain = NoDrafter() if engine.refuses(NoDrafter()) is None else None
        self._encoders = ThreadPoolExecutor(2, thread_name_prefix="outrider-encode")
        self._compilers = Limited(self.limits.compile_seconds, "outrider-compile")
        self._loaders = ThreadPoolExecutor(1, thread_name_prefix="outrider-load")
        self._draining = False
        self._drained_by = float("inf")

    @property
    def state(self) -> State:
        """Whether new tasks are served."""
        if self._worker.error is not None:
            return "engine_dead"
        if self._draining:
            return "draining"
        stalled = self._worker.alive and time.monotonic() - self._worker.heartbeat > self.limits.stall_seconds
        return "stalled" if stalled else "ready"

    @property
    def in_flight(self) -> int:
        """Number of tasks that wait or run."""
        return self.slots.in_flight

    @property
    def max_context(self) -> int:
        """Longest context in tokens, prompt and output together."""
        return self.engine.parts.target.max_context

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's tokenizer. Raises InputError if there is none."""
        if self.engine.tokenizer is None:
            raise InputError(NO_TOKENIZER)
        return self.engine.tokenizer

    def start(self) -> None:
        """Start the engine's thread."""
        self._worker.start()

    async def drain(self, seconds: float) -> None:
        """Take no more tasks, let the others end, and close. A later call may shorten the time.

        Args:
            seconds: After so long, tasks that still run are cancelled, and their readers get an error.
        """
        self._draining = True
        self._drained_by = min(self._drained_by, time.monotonic() + seconds)
        while self.in_flight and self._worker.alive and time.monotonic() < self._drained_by:
            await asyncio.sleep(LOOK)
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Cancel all tasks, end the engine's thread and the pools. A second call does nothing."""
        self._draining = True
        self._worker.stop(Draining())
        self._worker.join()
        self._encoders.shutdown(wait=False, cancel_futures=True)
        self._compilers.close()
        self._loaders.shutdown(wait=False, cancel_futures=True)

    def submit(self, tasks: Sequence[OutputTask]) -> list[Ticket]:
        """Queue all tasks, or none of them. Called on the event loop that reads the tickets.

        Raises:
            InputError: A task cannot be run.
            ServeError: There is no room (`QueueFull`), or the service is stopping or dead.
        """
        if self._worker.error is not None:
            raise EngineDead
        if self._draining:
            raise Draining
        loop, latest = asyncio.get_running_loop(), time.monotonic() + self.limits.request_timeout
        tickets = []
        for task in tasks:
            drafter = self._drafter(task.speculation)
            ticket = Ticket(
                self.engine.request(task.prompt, id=task.id, options=_options(task)),
                loop=loop,
                limits=self.limits,
                deadline=latest if task.deadline is None else task.deadline,
                drafter=drafter,
                on_cancel=self._worker.cancel,
            )
            tickets.append(ticket)
        try:
            self.slots.take(tasks, retry_after=self.metrics.wait(self.slots.waiting, self.engine.max_slots))
        except QueueFull as full:
            self.metrics.note_refusal(full.code)
            raise
        self.metrics.note_request([ticket.request.max_new_tokens for ticket in tickets])
        self._worker.add(tickets)
        return tickets

    async def score(self, prompt: Sequence[int], top: int) -> PromptLogprobs:
        """Log-softmax of the target's raw logits at each token of a prompt, and at the likeliest ones. Nothing is
        drafted.

        Args:
            top: How many of the likeliest tokens at each position; 0 for none.

        Raises:
            InputError, ServeError: As `submit` and `Ticket`.
        """
        options = Generation(max_new_tokens=0, prompt_logprobs=top, sampling=Sampling(temperature=0, seed=0))
        task = OutputTask(
            id=f"score-{uuid.uuid4().hex}",
            prompt=tuple(prompt),
            options=options,
            speculation=RequestSpeculation(enabled=False),
        )
        [ticket] = self.submit([task])
        try:
            async for update in ticket:
                output = update.output
        finally:
            ticket.cancel()
        if output is None or output.prompt_logprobs is None:
            raise ServeError(500, "the prompt was not scored")
        return output.prompt_logprobs

    async def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids of a text.

        Args:
            special: Whether the tokenizer adds its special tokens.
        """
        if len(text) <= SHORT:
            return encode_text(text, self.tokenizer, special=special)
        return await self._in(self._encoders, partial(encode_text, text, self.tokenizer, special=special))

    async def encode_chat(self, prompt: ChatPrompt) -> list[int]:
        """Token ids of chat messages. Raises InputError if the template makes no prompt of them."""
        return await self._in(self._encoders, partial(encode_chat, self.tokenizer, prompt))

    async def bind(self, grammar: Grammar, options: Generation) -> Constraint:
        """Compile a grammar for outputs that are made with these options, off the event loop.

        Raises:
            InputError: The grammar cannot be compiled, or takes too much CPU time.
            ServeError: The server is still busy with grammars that were given up.
        """
        vocab_size = self.engine.parts.target.vocab_size
        bind = partial(bound, grammar, self.engine.tokenizer, vocab_size, self.engine.ends(options))
        began = time.perf_counter()
        try:
            constraint = await self._compilers.run(bind)
        except TimeoutError as error:
            most = f"{self.limits.compile_seconds:g} seconds of CPU time"
            raise InputError(f"the {grammar.kind} takes more than {most} to compile; shorten it") from error
        self.metrics.note_grammar(time.perf_counter() - began)
        return constraint

    def swap(self, drafter: Drafter) -> Awaitable[None]:
        """Use another drafter for new tasks that name none. Raises InputError if it does not fit the other parts, or if
        the drafter learns.
        """
        if self._learns:
            raise InputError(LEARNS)
        return asyncio.wrap_future(self._worker.call(partial(self.engine.swap, drafter)))

    async def renew(self, name: str, weights: Path) -> None:
        """Give a drafter other weights, for new tasks. It is loaded while others run.

        Args:
            name: Of the list of drafters.
            weights: A file of safetensors; it is moved.

        Raises:
            InputError: The weights do not fit the drafter, or it has no folder on this machine.
        """
        if self.renewal is None:
            raise InputError("this server takes no weights")
        if self._learns and name == self.drafter:
            raise InputError(LEARNS)
        fresh = await self._in(self._loaders, partial(_renewed, self.renewal, name, weights))
        old = self.drafters[name]
        if self.engine.parts.drafter is old:
            await self.swap(fresh)
        elif (reason := self.engine.refuses(fresh)) is not None:
            raise InputError(reason)
        self.drafters[name] = fresh

    async def _in(self, pool: ThreadPoolExecutor, function: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(pool, function)

    def _drafter(self, asked: RequestSpeculation) -> Drafter | None:
        """The drafter of a task; None for the usual one. Raises InputError for drafts that the engine cannot make."""
        for name in ("max_tokens", "max_context"):
            value = getattr(asked, name)
            if value is not None and whole(f"speculation.{name}", value) < 0:
                raise InputError(f"speculation.{name} must be >= 0, got {value}")
        if asked.drafter is not None and asked.drafter not in self.drafters:
            raise unknown("speculation.drafter", asked.drafter, self.drafters)
        for name in ("verifier", "tree"):
            wanted, served = getattr(asked, name), catalog.name_of(getattr(self.engine.parts, name))
            if wanted is not None and wanted != served:
                raise InputError(
                    f"speculation.{name} {wanted!r} is not served: all requests of a step share one {name}, and this "
                    f"server was started with {served!r}"
                )
        if asked.off:
            return self._plain
        newest = asked.drafter is None or (self._learns and asked.drafter == self.drafter)
        return None if newest else self.drafters[str(asked.drafter)]


def _renewed(renewal: Renewal, name: str, weights: Path) -> Drafter:
    """A drafter with other weights, made in a thread that computes nothing else."""
    try:
        return renewal.renewed(name, weights)
    finally:
        release_threads()


def _options(task: OutputTask) -> Generation:
    """What is asked of an output, the limits of its drafts among it."""
    asked, options = task.speculation, task.options
    return replace(
        options,
        max_draft_tokens=0 if asked.off else _least(asked.max_tokens, options.max_draft_tokens),
        max_draft_context=_least(asked.max_context, options.max_draft_context),
        owner=task.owner,
    )


def _least(one: int | None, other: int | None) -> int | None:
    """The smaller of two limits, of which None sets none."""
    return min((limit for limit in (one, other) if limit is not None), default=None)
