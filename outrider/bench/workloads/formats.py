"""The formats of workloads, each known by the fields of its records."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.bench.workloads.conversation import Conversation, Message
from outrider.bench.workloads.record import FileRecord
from outrider.core.conversations import RecordedConversation, RecordShape, conversation_of
from outrider.core.inputs import InputError

PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"
"""How SPEED-Bench's texts begin before its own tool has fetched them."""
OPTIONS = ("temperature", "top_p", "top_k", "seed", "stop")
"""Options of requests, which a line must not hold: a measurement has one of each."""


@dataclass(frozen=True, kw_only=True)
class TraceUnits:
    """What the numbers of a trace count.

    Attributes:
        seconds: Seconds of one unit of its timestamps; Mooncake's are milliseconds.
        block: Prompt tokens that one hash stands for; 512 in Mooncake's, 16 in vLLM's timed traces.
    """

    seconds: float = 0.001
    block: int = 512

    def __post_init__(self) -> None:
        if not self.seconds > 0 or self.block < 1:
            raise InputError(f"a trace's units must be > 0, got {self.seconds:g} seconds and blocks of {self.block}")


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format of workloads.

    Attributes:
        name: What it is called.
        fits: Whether a record is of this format.
        read: The conversation of a record. Raises InputError where it is not of this format after all.
    """

    name: str
    fits: Callable[[FileRecord], bool]
    read: Callable[[FileRecord, TraceUnits], Conversation]


def user(text: str) -> Message:
    """What the user says."""
    return {"role": "user", "content": text}


def played(record: FileRecord) -> RecordedConversation:
    """The conversation of a record. Raises InputError if it holds none."""
    try:
        conversation = conversation_of(record.fields)
    except InputError as error:
        raise InputError(f"{record.place}: {error}") from error
    if conversation is None:
        raise InputError(f"{record.place} holds no conversation; it must have `turns` or `messages`")
    return conversation


def single(name: str, ids: tuple[str, ...] = ()) -> Callable[[FileRecord, TraceUnits], Conversation]:
    """A reader of one field that is the user's only message."""
    return lambda record, _: Conversation(
        id=record.id(*ids), category=record.category(name), opening=[user(record.text(name))]
    )


def benchmark(record: FileRecord, _: TraceUnits) -> Conversation:
    """Spec-Bench, MT-bench and SPEED-Bench: the user's turns are played; a system message stays before the first."""
    conversation = played(record)
    messages = [*conversation.messages, *conversation.later]
    for each in messages:
        if str(each.get("content", "")).lstrip().upper().startswith(PLACEHOLDER):
            raise InputError(
                f"{record.place}: 'messages' holds SPEED-Bench's placeholder, not the text; fetch the texts with the "
                "script that comes with the data set"
            )
    asked = [each for each in messages if each["role"] == "user"]
    if not asked:
        raise record.wrong("messages", "messages of which one is the user's")
    return Conversation(
        id=record.id("question_id", "prompt_id"),
        category=record.category("conversation"),
        shape=conversation.shape,
        opening=[*(each for each in messages if each["role"] == "system"), asked[0]],
        replies=tuple((each,) for each in asked[1:]),
    )


def share_gpt(record: FileRecord, _: TraceUnits) -> Conversation:
    """ShareGPT: the first text is the prompt."""
    conversation = played(record)
    shape = RecordShape(
        one="ShareGPT conversation", many="ShareGPT conversations", meaning="the first text of each is the prompt"
    )
    first = str(conversation.messages[0]["content"])
    return Conversation(id=record.id("id"), category="conversation", shape=shape, opening=[user(first)])


def trace(record: FileRecord, units: TraceUnits) -> Conversation:
    """A trace: when a request arrives, and how long it and its answer are. A repeated hash is a shared beginning.

    Token ids are drawn from what the hashes are, so that equal hashes are equal tokens. Such texts mean nothing: what
    is accepted of them says nothing about a drafter, only what times are like where as much is accepted.
    """
    length = record.count("input_length")
    hashes = record.fields.get("hash_ids") or []
    if not isinstance(hashes, list) or not all(isinstance(each, int) for each in hashes):
        raise record.wrong("hash_ids", "a list of whole numbers")
    blocks = [each for hash in hashes for each in words(hash, units.block)][:length]
    tail = words(-1 - record.number, length - len(blocks))
    return Conversation(
        id=str(record.number),
        category="trace",
        opening=(*blocks, *tail),
        output_tokens=record.count("output_length"),
        arrives=record.time("timestamp") * units.seconds,
    )


def words(key: int, count: int) -> list[int]:
    """Numbers from 0 to 2^31 that depend on a key alone; the run takes them modulo its vocabulary."""
    numbers: list[int] = np.random.default_rng([key & 0xFFFFFFFF, key < 0]).integers(0, 1 << 31, count).tolist()
    return numbers


def ours(record: FileRecord, _: TraceUnits) -> Conversation:
    """Outrider's own: `prompt`, a text to continue; or `turns`; or `messages`."""
    for name in OPTIONS:
        if record.has(name):
            raise InputError(f"{record.place}: {name!r} is an option for all prompts; give it on the command line")
    settings: dict[str, Any] = {"id": record.id("id"), "category": record.category("all")}
    if record.has("output_tokens"):
        settings["output_tokens"] = record.count("output_tokens")
    if record.has("timestamp"):
        settings["arrives"] = record.time("timestamp")
    if not record.has("turns") and not record.has("messages"):
        return Conversation(opening=record.text("prompt"), **settings)
    conversation = played(record)
    replies = tuple((each,) for each in conversation.later)
    return Conversation(shape=conversation.shape, opening=list(conversation.messages), replies=replies, **settings)


def custom(record: FileRecord, _: TraceUnits) -> Conversation:
    """vLLM's custom data set: one message of the user."""
    wanted = record.count("output_tokens") if record.has("output_tokens") else None
    return Conversation(
        id=str(record.number), category="all", opening=[user(record.text("prompt"))], output_tokens=wanted
    )


def any_of(*names: str) -> Callable[[FileRecord], bool]:
    """Whether a record has all these fields."""
    return lambda record: record.has(*names)


FORMATS = (
    Format(name="SPEED-Bench", fits=any_of("question_id", "messages"), read=benchmark),
    Format(name="Spec-Bench", fits=any_of("question_id", "turns"), read=benchmark),
    Format(name="MT-bench prompts", fits=any_of("prompt_id", "prompt"), read=benchmark),
    Format(name="ShareGPT", fits=any_of("conversations"), read=share_gpt),
    Format(name="trace", fits=any_of("timestamp", "input_length", "output_length"), read=trace),
    Format(name="HumanEval", fits=any_of("task_id", "prompt"), read=single("prompt", ("task_id",))),
    Format(name="MBPP", fits=any_of("text", "test_list"), read=single("text", ("task_id",))),
    Format(name="MATH", fits=any_of("problem"), read=single("problem", ("unique_id",))),
    Format(name="GSM8K", fits=any_of("question", "answer"), read=single("question")),
    Format(name="Outrider", fits=lambda record: record.has("id") and has_prompt(record), read=ours),
    Format(name="vLLM custom", fits=lambda record: isinstance(record.fields.get("prompt"), str), read=custom),
    Format(name="Outrider", fits=lambda record: has_prompt(record), read=ours),
)
"""All formats. The first that fits a file's first record is the file's."""


def has_prompt(record: FileRecord) -> bool:
    """Whether a record holds a prompt of Outrider's own format."""
    return any(record.has(name) for name in ("prompt", "turns", "messages"))


def format_of(record: FileRecord) -> Format:
    """The format of a file, by its first record.

    Raises:
        InputError: There is none; the message lists the formats.
    """
    for each in FORMATS:
        if each.fits(record):
            return each
    names = ", ".join(dict.fromkeys(each.name for each in FORMATS))
    keys = ", ".join(map(repr, list(record.fields)[:8])) or "no fields"
    raise InputError(f"{record.place} is of no known format: it holds {keys}; formats: {names}")
