"""outrider bench of servers: the one at --url, or vLLM without drafts and then with them."""

import itertools
import json
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, cast

from rich.console import Console

from outrider.bench.evidence import Row
from outrider.bench.side_by_side import metrics
from outrider.bench.side_by_side.arrivals import Load
from outrider.bench.side_by_side.metrics import Objectives
from outrider.bench.side_by_side.player import OutputChunk, Player
from outrider.bench.side_by_side.prompts import BETWEEN, Encoder, ask
from outrider.bench.side_by_side.served import Served
from outrider.bench.workloads.conversation import Conversation
from outrider.bench.workloads.formats import TraceUnits
from outrider.bench.workloads.workload import BUILT_IN, read_workload
from outrider.cli.backend import Backend, support_of
from outrider.cli.bench import MAX_NEW_TOKENS, BenchOptions
from outrider.cli.bench_printed import WIDTH
from outrider.cli.printed import print_line, table
from outrider.cli.remote import RemoteOptions
from outrider.cli.request import RequestOptions
from outrider.cli.url_backend import UrlBackend
from outrider.core.inputs import InputError
from outrider.engine.output import succeeded
from outrider.serve.client.answers import tokenize
from outrider.serve.client.remote import Remote, RemoteError
from outrider.serve.vllm.counters import Acceptance
from outrider.serve.vllm.options import EngineChoice
from outrider.serve.vllm.process import VllmProcess
from outrider.setup import Setup


def bench_url(
    setup: Setup,
    request: RequestOptions,
    options: BenchOptions,
    engine: EngineChoice,
    remote: RemoteOptions,
    configurations: Sequence[str],
    as_json: bool,
) -> int:
    """Measure what was chosen, and print its figures. Returns the exit status."""
    support_of(engine, remote).check(setup, options, {"with": configurations})
    objectives, loads = Objectives.parse(options.objective), options.loads(request.seed or 0)
    figures: list[dict[str, Any]] = []
    with closing(_servers(setup, request, options, engine, remote)) as servers:
        for title, server, card in servers:
            note = (lambda line: None) if figures else print_line
            rows = measure(server, card, request, options, note)
            for load in loads:
                figures.append({"engine": title, **summary([r for r in rows if r["load"] == load.name], objectives)})
    first = figures[: len(loads)]
    if engine.is_vllm:
        for plain, each in zip(itertools.cycle(first), figures, strict=False):
            each["speedup"] = each["output_throughput"] / plain["output_throughput"]
    if as_json:
        for each in figures:
            print(json.dumps(each))
        return 0
    print_figures(figures)
    for each in figures[len(first) :]:
        speedup = f"{each['speedup']:.2f} times the tokens per second of plain vLLM"
        Console(highlight=False, soft_wrap=True).print(f"{each['engine']}, {each['load']}: {speedup}")
    return 0


def _servers(
    setup: Setup, request: RequestOptions, options: BenchOptions, engine: EngineChoice, remote: RemoteOptions
) -> Generator[tuple[str, Remote, Mapping[str, Any]], None, None]:
    """The servers to measure, one after the other: two at once would take each other's cores and memory."""
    if remote.url is not None:
        server = remote.remote()
        card = remote.card(server)
        yield str(card["id"]), server, card
        return
    # Its folder may hold the drafter as vLLM reads it.
    drafting = engine.process(setup, options.vllm_python)
    try:
        drafting.check(request.body())
        launches = [("vllm, plain", replace(drafting.launch, speculation=None))]
        if drafting.launch != launches[0][1]:
            launches.append((f"vllm, {drafting.launch.method}", drafting.launch))
        for title, launch in launches:
            with VllmProcess(drafting.python, launch, tell=drafting.tell) as process:
                yield title, process.remote, process.remote.models()[0]
    finally:
        drafting.stop()


def measure(
    remote: Remote,
    card: Mapping[str, Any],
    request: RequestOptions,
    options: BenchOptions,
    note: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """Play the workload at each load, and return one row for each load and round.

    Args:
        card: What the server's list says of its model.
        note: Called with what the workload was taken for, in words.

    Raises:
        InputError: Something that was given is wrong, the server refuses a request, or it does not answer.
    """
    request = replace(request, max_new_tokens=request.max_new_tokens or MAX_NEW_TOKENS)
    seed, most, loads = request.seed or 0, request.max_new_tokens or 0, options.loads(request.seed or 0)
    workload = read_workload(options.workload, TraceUnits(seconds=options.trace_unit, block=options.trace_block))
    if options.workload != BUILT_IN:
        note(f"{workload.name}: {workload.taken_for}")
    for load in loads:
        load.times(workload.conversations)
    encoder, room = RemoteEncoder(remote), longest_context(card) - 1
    if most > room:
        raise InputError(f"max_new_tokens must be <= {room}, which is the room of the server, got {most}")
    asked = ask(workload, encoder, count=options.num_prompts or None, room=room - most, seed=seed)
    player = Player(encoder=encoder, max_new_tokens=most, room=room)
    server = BackendServer(UrlBackend(remote, str(card["id"])), request)
    return [
        _row(remote, server, player, asked.conversations, load, number, seed)
        for load in loads
        for number in range(options.rounds)
    ]


class BackendServer:
    """A backend as conversations are played on it."""

    def __init__(self, backend: Backend, request: RequestOptions) -> None:
        self._backend, self._request = backend, request

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return self._backend.busy

    def submit(self, id: str, prompt: Sequence[int], max_new_tokens: int, seed: int) -> None:
        """Send a request."""
        self._backend.add(list(prompt), replace(self._request, max_new_tokens=max_new_tokens, seed=seed), id=id)

    def advance(self) -> list[OutputChunk]:
        """The chunks that have come. Raises the error of a request that fails."""
        return [
            OutputChunk(
                id=update.id,
                num_tokens=len(update.tokens),
                drafted=0,
                accepted=0,
                answer=None if update.output is None else update.output.text,
            )
            for update in map(succeeded, self._backend.step())
        ]


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
            return tokenize(self._remote, {"prompt": opening})
        if not conversation.is_chat:
            return [int(cast(int, token)) for token in opening]
        messages = conversation.messages(answers)
        if self._has_template is not False:
            try:
                tokens = tokenize(self._remote, {"messages": messages})
            except RemoteError as error:
                if self._has_template or error.status != 400:
                    raise
            else:
                self._has_template = True
                return tokens
        self._has_template = False
        return tokenize(self._remote, {"prompt": BETWEEN.join(str(each["content"]) for each in messages)})


def summary(rows: Sequence[Row], objectives: Objectives | None = None) -> dict[str, Any]:
    """The figures of the rows of one load."""
    served = [Served.read(each) for row in rows for each in row["served"]]
    seconds = sum(row["seconds"] for row in rows)
    counts = [row["speculation"] for row in rows]
    drafts = Acceptance() if None in counts else Acceptance.total([Acceptance(**each) for each in counts])
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
        "goodput": None if objectives is None else metrics.goodput(served, seconds, objectives),
        "acceptance_length": drafts.acceptance_length if drafts.num_drafts else None,
        "acceptance_rate": drafts.acceptance_rate if drafts.num_draft_tokens else None,
        "speculation": None if None in counts else vars(drafts),
    }


def longest_context(card: Mapping[str, Any]) -> int:
    """The longest context of a model. Raises InputError if the server does not tell it."""
    longest = card.get("max_model_len")
    if not isinstance(longest, int):
        raise InputError(
            "the server does not tell its longest context (max_model_len in /v1/models), which bench needs"
        )
    return longest


def counted(remote: Remote) -> Acceptance | None:
    """The server's counts of speculation so far; None where it does not tell."""
    try:
        return Acceptance.of_metrics(remote.text("/metrics"))
    except RemoteError:
        return None


def _row(
    remote: Remote,
    server: BackendServer,
    player: Player,
    conversations: Sequence[Conversation],
    load: Load,
    number: int,
    seed: int,
) -> Row:
    """One round of one load."""
    before, began = counted(remote), time.perf_counter()
    served = player.play(server, conversations, load, seed + number)
    seconds, after = time.perf_counter() - began, counted(remote)
    return {
        "load": load.name,
        "round": number,
        "requests": len(served),
        "tokens": sum(each.num_tokens for each in served),
        "seconds": seconds,
        "speculation": None if before is None or after is None else vars(after.since(before)),
        "served": [each.written() for each in served],
    }


def print_figures(figures: Sequence[Mapping[str, Any]]) -> None:
    """The most important figures of each load."""
    console = Console(highlight=False, soft_wrap=True, width=max(WIDTH, Console().width))
    latencies = ("TTFT ms", "p99", "TPOT ms", "p99")
    loads = table(("load", "requests/s", "tokens/s", *latencies, "good/s", "tokens/draft", "accepted"), no_wrap=True)
    for each in figures:
        times = [
            "-" if each[kind] is None else f"{1000 * each[kind][name]:.1f}"
            for kind in ("ttft", "tpot")
            for name in ("mean", "p99")
        ]
        good, length, rate = each["goodput"], each["acceptance_length"], each["acceptance_rate"]
        loads.add_row(
            f"{each['engine']}, {each['load']}",
            f"{each['request_throughput']:.2f}",
            f"{each['output_throughput']:.1f}",
            *times,
            "-" if good is None else f"{good:.2f}",
            "-" if length is None else f"{length:.2f}",
            "-" if rate is None else f"{rate:.0%}",
        )
    console.print(loads)
