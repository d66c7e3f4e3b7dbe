"""What a conversation in a record of data means, by its shape: the one reading for prompts, workloads and training.

Roles count where they are given. A list of texts has none: where a benchmark asks questions, each text is a turn of
the user, and the model's own answers stand between them; otherwise user and assistant speak in turn.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.core.inputs import InputError, shown

FIELDS = ("messages", "turns", "conversations", "prompt")
"""Fields that may hold a conversation, in the order in which they are looked for. `prompt` does where it is a list."""
QUESTIONS = ("question_id", "prompt_id")
"""Fields of a benchmark's record, all of whose texts are the user's."""
SPEAKERS = {"human": "user", "gpt": "assistant"}
"""Names of roles in ShareGPT's files."""


@dataclass(frozen=True, kw_only=True)
class RecordShape:
    """What a record was taken for, in words.

    Attributes:
        one: Name of one such record.
        many: Name of several.
        meaning: How its texts are read; empty where there is no doubt.
        is_question: Whether only the user's turns are given, so that later turns need the model's own answers.
    """

    one: str
    many: str
    meaning: str = ""
    is_question: bool = False


@dataclass(frozen=True, kw_only=True)
class RecordedConversation:
    """A conversation in a record.

    Attributes:
        shape: What the record was taken for.
        messages: With roles. Of a question, those up to the first turn of the user.
        later: Further turns of the user, each behind an answer of the model.
    """

    shape: RecordShape
    messages: tuple[Mapping[str, Any], ...]
    later: tuple[Mapping[str, Any], ...] = ()


def conversation_of(fields: Mapping[str, Any]) -> RecordedConversation | None:
    """The conversation in a record; None if it holds none.

    Raises:
        InputError: A field of a conversation holds something else.

    Example:
        >>> found = conversation_of({"question_id": 81, "turns": ["Write a post.", "Make it short."]})
        >>> found.messages, found.later
        (({'role': 'user', 'content': 'Write a post.'},), ({'role': 'user', 'content': 'Make it short.'},))
        >>> [each["role"] for each in conversation_of({"turns": ["Hello", "Good day."]}).messages]
        ['user', 'assistant']
    """
    name = next((name for name in FIELDS if fields.get(name) is not None), None)
    if name is None or (name == "prompt" and isinstance(fields[name], str)):
        return None
    turns = fields[name]
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
        raise InputError(f"{name!r} must be a conversation, a list of texts or of messages, got {shown(turns)}")
    asks = any(fields.get(each) is not None for each in QUESTIONS)
    if name != "messages" and all(isinstance(each, str) for each in turns):
        return _of_texts(name, turns, asks or (fields.get("category") is not None and len(turns) % 2 == 0))
    messages = tuple(_message(name, each) for each in turns)
    questions = [number for number, each in enumerate(messages) if each["role"] == "user"]
    if asks and questions and not any(each["role"] == "assistant" for each in messages):
        shape = RecordShape(
            one="question",
            many="questions",
            meaning=f"each message of the user in `{name}` is a turn, with an answer of the model behind it",
            is_question=True,
        )
        begin = messages[: questions[0] + 1]
        return RecordedConversation(shape=shape, messages=begin, later=tuple(messages[n] for n in questions[1:]))
    return RecordedConversation(shape=RecordShape(one="conversation", many="conversations"), messages=messages)


def taken_for(counts: Counter[RecordShape], *, answers_first: bool = False) -> str:
    """What the records of a file were taken for, in words.

    Args:
        answers_first: Whether only the first turn of a question is answered.

    Example:
        >>> shape = conversation_of({"question_id": 81, "turns": ["Why?", "And?"]}).shape
        >>> taken_for(Counter({shape: 80}))
        '80 MT-bench questions: each string of `turns` is a user turn'
    """
    return "; ".join(_describe(shape, count, answers_first) for shape, count in counts.items())


def _describe(shape: RecordShape, count: int, answers_first: bool) -> str:
    text = f"{count:,} {shape.one if count == 1 else shape.many}"
    if shape.meaning:
        text += f": {shape.meaning}"
    if shape.is_question and answers_first:
        text += " (only the first is answered here; `outrider bench` plays them all)"
    return text


def _of_texts(name: str, texts: Sequence[str], asks: bool) -> RecordedConversation:
    """A conversation without roles.

    Args:
        asks: Whether all texts are the user's. Prompts of a benchmark end where the model speaks next, so an even
            number of texts there cannot be user and assistant in turn.
    """
    if asks:
        first, *later = ({"role": "user", "content": text} for text in texts)
        shape = RecordShape(
            one="MT-bench question",
            many="MT-bench questions",
            meaning=f"each string of `{name}` is a user turn",
            is_question=True,
        )
        return RecordedConversation(shape=shape, messages=(first,), later=tuple(later))
    said = "is a user turn" if len(texts) == 1 else "are user and assistant in turn"
    meaning = f"the {'string' if len(texts) == 1 else 'strings'} of `{name}` {said}"
    shape = RecordShape(one="conversation", many="conversations", meaning=meaning)
    roles = ("user", "assistant")
    messages = tuple({"role": roles[n % 2], "content": text} for n, text in enumerate(texts))
    return RecordedConversation(shape=shape, messages=messages)


def _message(name: str, entry: Any) -> Mapping[str, Any]:
    """A message with role and content, or ShareGPT's with from and value."""
    message = dict(entry) if isinstance(entry, Mapping) else {}
    if "from" in message:
        speaker = message["from"]
        message = {"role": SPEAKERS.get(speaker, speaker), "content": message.get("value")}
    content = isinstance(message.get("content"), str | list) or bool(message.get("tool_calls"))
    if not isinstance(message.get("role"), str) or not content:
        raise InputError(f"a message of {name!r} needs role and content, got {shown(entry)}")
    return message
