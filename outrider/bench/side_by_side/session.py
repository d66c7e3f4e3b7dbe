"""A measurement: configurations are built, pass the gate, are warmed up, and take turns; rows are kept as they come."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers

import outrider
from outrider.assembly import MAX_SLOTS, assemble, check_names, completed, tokenizer_of
from outrider.bench.circumstances import circumstances
from outrider.bench.evidence import Row
from outrider.bench.folder import Folder, folder
from outrider.bench.side_by_side.arrivals import ClosedLoop, Load
from outrider.bench.side_by_side.configuration import DEFAULT, PLAIN, Configuration
from outrider.bench.side_by_side.gating import NotLossless, passed
from outrider.bench.side_by_side.meters import measured
from outrider.bench.side_by_side.metrics import Objectives
from outrider.bench.side_by_side.peers import PeerOptions, Peers
from outrider.bench.side_by_side.player import Player
from outrider.bench.side_by_side.prompts import Encoder, PromptSet, ask
from outrider.bench.side_by_side.ways import EngineWay, LeftOut, Way
from outrider.bench.turns import Turn, turns
from outrider.bench.workloads.conversation import Conversation
from outrider.bench.workloads.formats import TraceUnits
from outrider.bench.workloads.workload import BUILT_IN, Workload, read_workload
from outrider.core.inputs import InputError
from outrider.core.option import check, option
from outrider.core.progress import task
from outrider.core.types import Sampling
from outrider.engine.engine import Engine
from outrider.engine.generation import Generation
from outrider.host.mapped import release_heap
from outrider.lm.hf.anatomy import Anatomy
from outrider.lm.hf.open import open_config, unwrapped
from outrider.lm.target_info import UNLIMITED
from outrider.plan.probe import FAR
from outrider.proof.gate import TIME_LIMIT, Copies
from outrider.setup import Setup

COMMAND = "outrider bench"
GROUPS = 3
"""A turn with several conversations at once plays so many times as many, so that slots are filled again."""
LEAST_CONTEXT = 2 * FAR
"""Fewest tokens of the context: the costs of steps are timed in half of it."""
MARGIN = 64
"""Tokens of the context beyond the longest prompt and its answer, for drafts at its end."""
WARM_TOKENS = 32
"""Most tokens of an answer of the warm-up."""


@dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """What is measured.

    Attributes:
        setup: The options that all configurations share.
        generation: What is asked of each request; `max_new_tokens` where the workload names no number.
        workload: As `read_workload` takes it.
        num_prompts: How many conversations; None takes all.
        loads: When requests come.
        rounds: How often every run is repeated.
        time_limit: Seconds after which no new turn begins; None measures everything.
        gate_limit: Seconds that the gate takes for each configuration, about.
        seed: Of the choice of conversations, of the order of turns, and of the draws.
        objectives: What a good request keeps; None counts no good ones.
        out: Folder for rows and reports; None keeps them in memory.
    """

    setup: Setup = field(default_factory=Setup)
    configurations: tuple[Configuration, ...] = (DEFAULT,)
    generation: Generation = field(default_factory=lambda: Generation(max_new_tokens=96))
    workload: str = BUILT_IN
    units: TraceUnits = field(default_factory=TraceUnits)
    num_prompts: int | None = option(24, least=1)
    loads: tuple[Load, ...] = (ClosedLoop(),)
    rounds: int = option(3, least=1)
    time_limit: float | None = option(None, above=0, finite=False, note=" seconds")
    gate_limit: float = option(TIME_LIMIT, above=0, finite=False, note=" seconds")
    seed: int = 0
    peers: PeerOptions = field(default_factory=PeerOptions)
    objectives: Objectives | None = None
    out: Path | None = None

    def __post_init__(self) -> None:
        names = [each.name for each in self.configurations]
        if twice := {name for name in names if names.count(name) > 1}:
            raise InputError(f"two configurations are called {min(twice)!r}; give them other names with name=...")
        check(self)
        if not self.loads:
            raise InputError("a measurement needs a load, such as a concurrency")

    @property
    def concurrency(self) -> int:
        """Most conversations at once of its closed loops; at least 1."""
        return max([1, *(load.concurrency for load in self.loads if isinstance(load, ClosedLoop))])


@dataclass(frozen=True, kw_only=True)
class Group:
    """Conversations that are played in one turn."""

    number: int
    conversations: tuple[Conversation, ...]

    @property
    def name(self) -> str:
        """Unique among the groups of a load."""
        return self.conversations[0].id if len(self.conversations) == 1 else f"group {self.number}"

    @property
    def category(self) -> str:
        """That of its conversations, or `several`."""
        categories = {each.category for each in self.conversations}
        return min(categories) if len(categories) == 1 else "several"


@dataclass(kw_only=True)
class Measurement:
    """What was measured.

    Attributes:
        target: Its name, for people.
        ways: Names of all ways that were measured, in the order in which they were given.
        drafting: Those that draft.
        outside: Those that are other engines.
        passed: What the gate checked of each configuration, and of each other engine.
        starts: Seconds that other engines took until their models were loaded.
        stopped: Configurations that the gate stopped, with the reason.
        left_out: What else is left out, with the reason.
        rows: One for each turn.
        circumstances: Under what the first row came about.
        device: Where the target is.
    """

    plan: BenchPlan
    target: str
    workload: Workload
    asked: PromptSet
    ways: list[str] = field(default_factory=list)
    drafting: set[str] = field(default_factory=set)
    outside: set[str] = field(default_factory=set)
    passed: dict[str, str] = field(default_factory=dict)
    starts: dict[str, float] = field(default_factory=dict)
    stopped: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    circumstances: Mapping[str, Any] = field(default_factory=dict)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


def measure(
    plan: BenchPlan,
    *,
    finish: Callable[[Measurement, Folder], None] = lambda measurement, place: None,
    tell: Callable[[Row], None] = lambda row: None,
    note: Callable[[str], None] = lambda line: None,
) -> Measurement:
    """Build, check, warm up, and take turns.

    Args:
        finish: Called at the end, while the folder is open.
        tell: Called with each row as it comes.
        note: Called with what the workload was taken for, in words.

    Raises:
        InputError: Something that was given is wrong, or no configuration is left.
    """
    workload = read_workload(plan.workload, plan.units)
    if plan.workload != BUILT_IN:
        note(f"{workload.name}: {workload.taken_for}")
    for load in plan.loads:
        load.times(workload.conversations)
    max_new_tokens = plan.generation.max_new_tokens
    encoder, limit = encoder_of(plan.setup)
    asked = ask(workload, encoder, count=plan.num_prompts, room=limit - 1 - max_new_tokens, seed=plan.seed)
    longest = max(encoder.longest(each, max_new_tokens) for each in asked.conversations)
    shared = shared_setup(plan, min(limit, max(longest + MARGIN, LEAST_CONTEXT)))
    for each in plan.configurations:
        if not each.swept:
            try:
                check_names(each.setup(shared))
            except InputError as error:
                raise _of_configuration(each, error) from error
    with task("loading"):
        first = assemble(shared)
    generation, room = settled(plan, first), first.parts.target.max_context - 1
    player = Player(encoder=encoder, max_new_tokens=generation.max_new_tokens, room=room)
    measurement = Measurement(
        plan=plan,
        target=setting_text(plan.setup.target or "embedded"),
        workload=workload,
        asked=asked,
        device=first.parts.target.device,
    )
    with folder(plan.out, COMMAND, arguments(measurement, generation)) as place:
        engines = checked(plan, shared, first, measurement)
        # The gate's float32 copies are gone, but the process holds their memory, and rows tell what it holds.
        release_heap()
        ways: list[Way] = [
            EngineWay(name=PLAIN, engine=first.plain(keep_warm=True), generation=generation, drafts=False, columns=1),
            *(EngineWay(name=name, engine=engine, generation=generation) for name, engine in engines.items()),
        ]
        peers = Peers(
            options=plan.peers,
            engine=next(iter(engines.values()), first),
            generation=generation,
            greedy=[encoder.prompt(each) for each in asked.conversations],
            new_tokens=generation.max_new_tokens,
            batch=plan.concurrency,
            threads=torch.get_num_threads(),
            revision=plan.setup.revision,
            left_out=measurement.left_out,
            passed=measurement.passed,
            starts=measurement.starts,
        )
        with peers:
            if plan.peers.names:
                with task("other engines"):
                    ways += peers.ways()
            measurement.ways = [way.name for way in ways]
            measurement.drafting = {way.name for way in ways if way.drafts}
            measurement.outside = {way.name for way in ways if way.outside}
            _take_turns(measurement, place, player, ways, tell)
        measurement.circumstances = place.circumstances
        with task("the report"):
            finish(measurement, place)
    return measurement


def setting_text(value: object) -> str:
    """A value of a setup as a text; of a model or a part in memory its class."""
    return str(value) if isinstance(value, str | int | float) else type(value).__name__


def encoder_of(setup: Setup) -> tuple[Encoder, int]:
    """What makes token ids for a setup's target, and the longest context that it may have. Loads no weights."""
    wanted = completed(setup)
    if isinstance(wanted.target, str):
        config = open_config(wanted.target, revision=wanted.revision, trust_remote_code=wanted.trust_remote_code)
    else:
        config = unwrapped(wanted.target).config
    anatomy, tokenizer = Anatomy.of(config), tokenizer_of(wanted)
    width = anatomy.text.vocab_size
    known = width if tokenizer is None else min(width, max(tokenizer.get_vocab().values()) + 1)
    return Encoder(tokenizer, wanted.vocab_size or known), wanted.max_context or anatomy.longest_context or UNLIMITED


def shared_setup(plan: BenchPlan, context: int) -> Setup:
    """The base setup, with slots and a context for the workload where it names none.

    Args:
        context: Tokens that the longest prompt and its answer need.
    """
    slots = max([plan.concurrency, *(MAX_SLOTS for load in plan.loads if not isinstance(load, ClosedLoop))])
    return replace(plan.setup, max_slots=plan.setup.max_slots or slots, max_context=plan.setup.max_context or context)


def settled(plan: BenchPlan, engine: Engine) -> Generation:
    """What is asked of each request: drawn as the target's generation config says, unless the plan says otherwise.

    Answers go on behind end tokens where an engine takes part whose driver cannot end there.
    """
    sampling = plan.generation.sampling or engine.sampling or Sampling()
    ignore_eos = plan.generation.ignore_eos or plan.peers.ignore_eos
    return replace(plan.generation, sampling=sampling, ignore_eos=ignore_eos)


def arguments(measurement: Measurement, generation: Generation) -> dict[str, object]:
    """What rows depend on: rows of other arguments are not merged.

    Besides what was given these are hashes of what is asked, and the versions of what answers.
    """
    plan, here = measurement.plan, circumstances({})
    sampling = {name: value for name, value in vars(generation.sampling).items() if name != "processors"}
    return {
        "setup": {name: setting_text(value) for name, value in plan.setup.options().items()},
        "max_new_tokens": generation.max_new_tokens,
        "ignore_eos": generation.ignore_eos,
        "sampling": {name: str(value) for name, value in sampling.items()},
        "seed": plan.seed,
        "workload": measurement.workload.name,
        "workload_sha256": measurement.workload.sha256,
        "token_ids_sha256": measurement.asked.token_ids,
        "chat_template_sha256": measurement.asked.template,
        "versions": {
            "outrider": outrider.__version__,
            "commit": str(here["commit"]),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "cpu": str(here["cpu"]),
        "threads": torch.get_num_threads(),
        "configurations": [each.name for each in plan.configurations],
        "peers": list(plan.peers.names),
        "loads": [load.name for load in plan.loads],
        "rounds": plan.rounds,
        "time_limit": plan.time_limit,
        "objectives": None if plan.objectives is None else str(plan.objectives),
    }


def checked(plan: BenchPlan, shared: Setup, first: Engine, measurement: Measurement) -> dict[str, Engine]:
    """An engine for each configuration whose parts fit and that passes the gate; the others are noted.

    Raises:
        InputError: A configuration that was named by itself does not fit, or none is left.
    """
    engines: dict[str, Engine] = {}
    copies: Copies = []
    with task("is it lossless?", len(plan.configurations), "configurations") as bar:
        for each in plan.configurations:
            try:
                engine = engine_of(shared, each, first)
            except InputError as error:
                if not each.swept:
                    raise _of_configuration(each, error) from error
                measurement.left_out[each.name] = str(error)
            else:
                try:
                    measurement.passed[each.name] = passed(engine, plan.gate_limit, copies)
                    engines[each.name] = engine
                except NotLossless as error:
                    measurement.stopped[each.name] = str(error)
            bar.advance()
    return engines


def _of_configuration(configuration: Configuration, error: InputError) -> InputError:
    return InputError(f"{configuration.name}: {error}")


def engine_of(shared: Setup, configuration: Configuration, first: Engine) -> Engine:
    """The engine of a configuration. It shares the first engine's target, and its drafter where both name the same."""
    setup = configuration.setup(shared)
    if setup == shared:
        return first
    if "forward" in configuration.options:
        return assemble(setup)
    same = "drafter" not in configuration.options
    return assemble(setup, target=first.parts.target, drafter=first.parts.drafter if same else None)


def groups_of(conversations: Sequence[Conversation], load: Load, *, alone: bool) -> list[Group]:
    """What is played in one turn: all conversations at a rate, otherwise a few times as many as run at once.

    Args:
        alone: Exactly as many as run at once, because an engine takes part that answers fixed batches.
    """
    if not isinstance(load, ClosedLoop):
        return [Group(number=0, conversations=tuple(conversations))]
    size = load.concurrency if alone or load.concurrency == 1 else GROUPS * load.concurrency
    whole = max(1, len(conversations) // size)
    # What is left over joins the last group, unless groups must be of one size.
    ends = [size * (i + 1) for i in range(whole)]
    if not alone:
        ends[-1] = len(conversations)
    return [
        Group(number=i, conversations=tuple(conversations[begin:end]))
        for i, (begin, end) in enumerate(zip([0, *ends], ends, strict=False))
    ]


def _take_turns(
    measurement: Measurement, place: Folder, player: Player, ways: Sequence[Way], tell: Callable[[Row], None]
) -> None:
    """All ways take turns on all groups of every load, after a warm-up."""
    plan, began = measurement.plan, time.monotonic()
    for number, load in enumerate(plan.loads):
        until = None if plan.time_limit is None else began + plan.time_limit * (number + 1) / len(plan.loads)
        groups = groups_of(measurement.asked.conversations, load, alone=bool(measurement.outside))
        for row in under_load(measurement, place, player, ways, load, groups, SessionClock(until=until)):
            tell(row)


def under_load(
    measurement: Measurement,
    place: Folder,
    player: Player,
    ways: Sequence[Way],
    load: Load,
    groups: Sequence[Group],
    clock: "SessionClock",
) -> list[Row]:
    """All ways take turns on the groups of one load, after a warm-up. The rows are added to what was found.

    Args:
        place: Keeps the rows.
        clock: Whether a turn may still be taken.
    """
    plan = measurement.plan
    todo = list(turns(ways, groups, rounds=plan.rounds, seed=f"{plan.seed}/{load.name}"))
    taken = {row["turn"] for row in place.rows if row.get("phase") == load.name}
    if any(turn.name not in taken for turn in todo):
        _warm_up(measurement, player, ways, groups[0], load)

    def run(turn: Turn[Way, Group]) -> Row | None:
        return _row(measurement, player, load, turn) if clock.allows(turn) else None

    rows = place.take(load.name, todo, run)
    measurement.rows += rows
    return rows


@dataclass
class SessionClock:
    """Whether time is left. A group that one way has done is done by all of them.

    Attributes:
        until: When time ends, as `time.monotonic` has it; None never ends.
        begun: The last group that was begun, with its round.
    """

    until: float | None
    begun: tuple[int, str] | None = None

    def allows(self, turn: Turn[Way, Group]) -> bool:
        """Whether a turn may be taken."""
        group = turn.round, turn.job.name
        if self.until is None or group == self.begun or time.monotonic() < self.until or self.begun is None:
            self.begun = group
            return True
        return False


def _warm_up(measurement: Measurement, player: Player, ways: Sequence[Way], group: Group, load: Load) -> None:
    """Let every way play the beginning of a group once."""
    short = replace(player, max_new_tokens=min(player.max_new_tokens, WARM_TOKENS))
    few = ClosedLoop(concurrency=load.concurrency if isinstance(load, ClosedLoop) else 1)
    asked = [replace(each, replies=(), output_tokens=None) for each in group.conversations[: few.concurrency]]
    with task(f"{load.name}: warm-up", len(ways), "runs") as bar:
        for way in ways:
            try:
                way.play(short, asked, few, measurement.plan.seed)
            except LeftOut as error:
                measurement.left_out[f"{way.name}, {load.name}"] = str(error)
            bar.advance()


def _row(measurement: Measurement, player: Player, load: Load, turn: Turn[Way, Group]) -> Row | None:
    """One turn as a line of `rows.jsonl`; None where a way does not do it."""
    way, group = turn.way, turn.job
    case = f"{way.name}, {load.name}"
    if case in measurement.left_out:
        return None
    try:
        with measured(measurement.device) as reading:
            played = way.play(player, group.conversations, load, measurement.plan.seed + turn.round)
    except LeftOut as error:
        measurement.left_out[case] = str(error)
        return None
    return {
        "method": way.name,
        "load": load.name,
        "prompt": group.name,
        "category": group.category,
        "requests": len(played.served),
        "tokens": sum(each.num_tokens for each in played.served),
        "seconds": played.seconds,
        "parts": {part: round(seconds, 6) for part, seconds in played.parts.items()},
        "peak_memory": played.memory if way.outside else reading.peak_memory,
        "joules": reading.joules,
        "served": [each.written() for each in played.served],
    }
