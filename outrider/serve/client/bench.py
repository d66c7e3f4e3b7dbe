"""A measurement of a server over HTTP, with the workloads, loads and figures of `outrider bench`."""

import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any, cast

from outrider.bench.evidence import Row
from outrider.bench.side_by_side import metrics
from outrider.bench.side_by_side.arrivals import ClosedLoop, Load
from outrider.bench.side_by_side.player import OutputChunk, Player
from outrider.bench.side_by_side.prompts import BETWEEN, Encoder, ask
from outrider.bench.side_by_side.served import Served
from outrider.bench.workloads.conversation import Conversation
from outrider.bench.workloads.formats import TraceUnits
from outrider.bench.workloads.workload import BUILT_IN, read_workload
from outrider.core.inputs import InputError
from outrider.serve.client.answers import tokenize
from outrider.serve.client.remote import Remote, RemoteError, understood

LOOK = 0.002
"""Seconds of a wait for chunks, so that requests that are due are sent in time."""
COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts_total",
    "num_draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
    "num_accepted_tokens": "vllm:spec_decode_num_accepted_tokens_total",
}
"""The server's counts of speculation, with vLLM's names."""


@dataclass(frozen=True, kw_only=True)
class RemotePlan:
    """What is measured.

    Attributes:
        workload: As `read_workload` takes it.
        num_prompts: How many conversations; None takes all.
        max_new_tokens: Tokens of an answer where the workload names no number.
        loads: When requests come.
        seed: Of the choice of conversations and of the draws.
        fields: Fields of every request, such as `temperature`.
    """

    remote: Remote
    model: str
    max_context: int
    workload: str
    units: TraceUnits = field(default_factory=TraceUnits)
    num_prompts: int | None = 24
    max_new_tokens: int = 64
    loads: tuple[Load, ...] = (ClosedLoop(),)
    rounds: int = 1
    seed: int = 0
    objectives: metrics.Objectives | None = None
    fields: dict[str, Any] = field(default_factory=dict)


class RemoteEncoder(Encoder):
    """Prompts as token ids, which the server makes. Each prompt is asked for once."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._known: dict[tuple[str, tuple[str, ...]], list[int]] = {}
        self._has_template: bool | None = None
        self.template = None

    def prompt(self, conversation: Conversation, answers: Sequence[str] = ()) -> list[int]:
        """The prompt of the next answer.

        Args:
            answers: What the model has said so far in this conversation.
        """
        key = conversation.id, tuple(answers)
        if key not in self._known:
            self._known[key] = self._asked(conversation, answers)
        return self._known[key]

    def _asked(self, conversation: Conversation, answers: Sequence[str]) -> list[int]:
        opening = conversation.opening
        if isinstance(opening, str):
            return self._tokens({"prompt": opening})
        if not conversation.is_chat:
            return [int(cast(int, token)) for token in opening]
        messages = conversation.messages(answers)
        if self._has_template is not False:
            try:
                found = self._tokens({"messages": messages})
            except RemoteError as error:
                if self._has_template or error.status != 400:
                    raise
            else:
                self._has_template = True
                return found
        self._has_template = False
        return self._tokens({"prompt": BETWEEN.join(str(each["content"]) for each in messages)})

    def _tokens(self, body: dict[str, Any]) -> list[int]:
        return tokenize(self._remote, body)


class RemoteServer:
    """A server over HTTP, each request in a thread of its own.

    Args:
        fields: Fields of every request.
    """

    def __init__(self, remote: Remote, model: str, fields: dict[str, Any]) -> None:
        self._remote = remote
        self._fields = {"model": model, "stream_options": {"include_usage": True}, "return_token_ids": True} | fields
        self._coming: queue.SimpleQueue[OutputChunk | Exception] = queue.SimpleQueue()
        self._running = 0

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return self._running > 0

    def submit(self, id: str, prompt: Sequence[int], max_new_tokens: int, seed: int) -> None:
        """Send a request."""
        # Servers take seeds of 63 bits.
        body = self._fields | {"prompt": list(prompt), "max_tokens": max_new_tokens, "seed": seed >> 1}
        self._running += 1
        threading.Thread(target=self._read, args=(id, body), daemon=True).start()

    def advance(self) -> list[OutputChunk]:
        """The chunks that have come, after a short wait for the first one. Raises the error of a request that fails."""
        found: list[OutputChunk] = []
        with suppress(queue.Empty):
            for wait in itertools.chain([LOOK], itertools.repeat(0.0)):
                each = self._coming.get(timeout=wait) if wait else self._coming.get_nowait()
                if isinstance(each, Exception):
                    raise each
                self._running -= each.answer is not None
                found.append(each)
        return found

    def _read(self, id: str, body: dict[str, Any]) -> None:
        """Pass on the chunks of a request, in its thread."""
        try:
            text, counted, usage = "", 0, None
            stream = self._remote.stream("/v1/completions", body)
            with closing(stream), understood(f"{self._remote.url}/v1/completions"):
                for each in stream:
                    usage = each.get("usage") or usage
                    if each["choices"]:
                        choice = each["choices"][0]
                        text += choice.get("text") or ""
                        count = len(choice["token_ids"]) if choice.get("token_ids") is not None else 1
                        counted += count
                        self._coming.put(OutputChunk(id=id, num_tokens=count, drafted=0, accepted=0))
                # Tokens that no chunk told count at the end.
                rest = 0 if usage is None else max(0, usage["completion_tokens"] - counted)
            self._coming.put(OutputChunk(id=id, num_tokens=rest, drafted=0, accepted=0, answer=text))
        except Exception as error:
            self._coming.put(error)


def measure_remote(
    plan: RemotePlan,
    tell: Callable[[Row], None] = lambda row: None,
    note: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """Play the workload at each load, and return one row for each load and round.

    Args:
        tell: Called with each row as it comes.
        note: Called with what the workload was taken for, in words.

    Raises:
        InputError: Something that was given is wrong, the server refuses a request, or it does not answer.
    """
    workload = read_workload(plan.workload, plan.units)
    if plan.workload != BUILT_IN:
        note(f"{workload.name}: {workload.taken_for}")
    for load in plan.loads:
        load.times(workload.conversations)
    encoder, room = RemoteEncoder(plan.remote), plan.max_context - 1
    if plan.max_new_tokens > room:
        raise InputError(
            f"max_new_tokens must be <= {room}, which is the room of the server, got {plan.max_new_tokens}"
        )
    asked = ask(workload, encoder, count=plan.num_prompts, room=room - plan.max_new_tokens, seed=plan.seed)
    player = Player(encoder=encoder, max_new_tokens=plan.max_new_tokens, room=room)
    rows: list[Row] = []
    for load in plan.loads:
        for number in range(plan.rounds):
            rows.append(_row(plan, player, asked.conversations, load, number))
            tell(rows[-1])
    return rows


def summary(plan: RemotePlan, rows: Sequence[Row]) -> dict[str, Any]:
    """The figures of the rows of one load."""
    served = [Served.read(each) for row in rows for each in row["served"]]
    seconds = sum(row["seconds"] for row in rows)
    counts = {name: sum(row["speculation"][name] for row in rows) for name in COUNTERS} if _told(rows) else None
    return {
        "load": rows[0]["load"],
        "requests": len(served),
        "tokens": sum(each.num_tokens for each in served),
        "seconds": seconds,
        "request_throughput": metrics.request_throughput(served, seconds),
        "output_throughput": metrics.output_throughput(served, seconds),
        "ttft": metrics.percentiles(metrics.time_to_first_token(served)),
        "tpot": metrics.percentiles(metrics.time_per_output_token(served)),
        "itl": metrics.percentiles(metrics.inter_chunk_latency(served)),
        "e2el": metrics.percentiles(metrics.end_to_end(served)),
        "goodput": None if plan.objectives is None else metrics.goodput(served, seconds, plan.objectives),
        "acceptance_length": _ratio(counts, "num_accepted_tokens", "drafts", 1.0),
        "acceptance_rate": _ratio(counts, "num_accepted_tokens", "num_draft_tokens", 0.0),
    }


def counters(remote: Remote) -> dict[str, float] | None:
    """The server's counts of speculation so far; None where it does not tell."""
    try:
        lines = remote.text("/metrics").splitlines()
    except RemoteError:
        return None
    found = {}
    for name, series in COUNTERS.items():
        own = [float(line.rsplit(" ", 1)[-1]) for line in lines if line.startswith((f"{series}{{", f"{series} "))]
        if not own:
            return None
        found[name] = sum(own)
    return found


def _row(plan: RemotePlan, player: Player, conversations: Sequence[Conversation], load: Load, number: int) -> Row:
    """One round of one load."""
    before, began = counters(plan.remote), time.perf_counter()
    server = RemoteServer(plan.remote, plan.model, plan.fields)
    served = player.play(server, conversations, load, plan.seed + number)
    seconds, after = time.perf_counter() - began, counters(plan.remote)
    told = None if before is None or after is None else {name: after[name] - before[name] for name in COUNTERS}
    return {
        "method": plan.model,
        "load": load.name,
        "round": number,
        "requests": len(served),
        "tokens": sum(each.num_tokens for each in served),
        "seconds": seconds,
        "speculation": told,
        "served": [each.written() for each in served],
    }


def _told(rows: Sequence[Row]) -> bool:
    return all(row["speculation"] is not None for row in rows)


def _ratio(counts: dict[str, float] | None, over: str, under: str, base: float) -> float | None:
    if counts is None or not counts[under]:
        return None
    return base + counts[over] / counts[under]
