"""What a record of a corpus says, as documents: a text, a prompt with its answer, a conversation, or token ids."""

import reprlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from outrider.core.conversations import RecordedConversation, RecordShape, conversation_of
from outrider.core.option import Bounds
from outrider.core.types import InputError
from outrider.engine.prompts import NO_TOKENIZER, encode
from outrider.learning.batch import Document
from outrider.training.data.documents import Corpus
from outrider.training.data.sources import DatasetPart, SourceRecord, records

ANSWERS = ("response", "completion", "text")
"""Fields that may hold the answer to `prompt`."""
WANTED = "`text`; `prompt` with `response` or `text`; `messages` or `turns`; `tokens`, with or without `start`"


def read_documents(
    source: str | Path | Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    part: DatasetPart | None = None,
    max_tokens: int | None = None,
    limit: int | None = None,
    prompts: bool = False,
    vocab_size: int | None = None,
) -> Corpus:
    """The corpus that a source holds. The source is read once, record by record.

    Args:
        source: A file of text or JSON lines (also with `.gz`), a folder of such files, a folder that `datasets` has
            saved, the name of a dataset on the Hub, or several of these.
        tokenizer: The target's; None if the source holds token ids.
        part: The part of a dataset to read.
        max_tokens: Most tokens to keep of a document; None keeps all.
        limit: Most documents to read; None reads all.
        prompts: Also keep prompts without an answer. By default a record without an answer is an error.
        vocab_size: Number of token ids, to check token ids in the source.

    Raises:
        InputError: A source does not exist, holds no text, or a record cannot be read. The message names it.
    """
    Bounds(least=1).check("limit", limit)
    sources: Iterable[str | Path] = [source] if isinstance(source, str | Path) else source
    reader = RecordReader(tokenizer=tokenizer, prompts=prompts, vocab_size=vocab_size)
    documents = (
        document for each in sources for record in records(each, part) for document in reader.documents(record)
    )
    try:
        return Corpus(islice(documents, limit), max_tokens=max_tokens, learnable=not prompts, taken=reader.taken)
    except InputError as error:
        if str(error).startswith("the corpus is empty"):
            raise InputError(f"{error}; {', '.join(map(str, sources))} must hold {WANTED}") from error
        raise


@dataclass(frozen=True, kw_only=True)
class RecordReader:
    """Makes documents of records.

    A conversation gives one document for each answer of the assistant: what stands before the answer is its prompt. A
    text and a last answer end with the tokenizer's end token.

    Attributes:
        tokenizer: The target's; None if all records hold token ids.
        prompts: Whether a prompt without an answer is a document too.
        vocab_size: Number of token ids; None does not check token ids.
        taken: How many records were taken for what. Changes in place.
    """

    tokenizer: PreTrainedTokenizerBase | None
    prompts: bool = False
    vocab_size: int | None = None
    taken: Counter[RecordShape] = field(default_factory=Counter)

    def documents(self, record: SourceRecord) -> Iterator[Document]:
        """The documents of a record.

        Raises:
            InputError: The record has no known field, or a field holds something else than it should, or there is no
                answer where one is needed.
        """
        fields = {name: value for name, value in record.fields.items() if value is not None}
        domain = fields.get("domain")
        try:
            conversation = conversation_of(fields)
            documents = list(self._documents(fields, conversation, record.ends))
        except InputError as error:
            raise InputError(f"{record.place}: {error}") from error
        shape = _shape(fields, conversation)
        if not self.prompts and documents:
            documents = [each for each in documents if each.start < len(each.tokens) or not each.start]
            if not documents:
                kind = f" ({shape.one}: {shape.meaning})" if shape.meaning else ""
                raise InputError(
                    f"{record.place}{kind} has a prompt and no answer; let the target answer it with "
                    "`outrider train data`"
                )
        self.taken[shape] += record.ends
        for document in documents:
            yield Document(tokens=document.tokens, start=document.start, domain=None if domain is None else str(domain))

    def _documents(
        self, fields: Mapping[str, Any], conversation: RecordedConversation | None, ends: bool
    ) -> Iterator[Document]:
        if "tokens" in fields:
            yield self._of_tokens(fields["tokens"], fields.get("start", 0))
        elif conversation is not None:
            for each in conversation.messages:
                _text("the content of a message", each.get("content"))
            yield from self._of_conversation(conversation.messages)
        elif "prompt" in fields:
            answer = next((fields[name] for name in ANSWERS if name in fields), None)
            yield self._of_pair(_text("prompt", fields["prompt"]), answer)
        elif "text" in fields:
            tokens = self._tokens(_text("text", fields["text"]))
            yield Document(tokens=_array(self._ended(tokens) if ends else tokens), start=0)
        else:
            raise InputError(f"no known field; it has {', '.join(fields) or 'none'}, and a record needs {WANTED}")

    def _of_tokens(self, tokens: Any, start: Any) -> Document:
        if not isinstance(tokens, Sequence) or not all(isinstance(token, Integral) for token in tokens):
            raise InputError("`tokens` must be a list of token ids")
        if not isinstance(start, Integral):
            raise InputError(f"`start` must be a whole number, got {start!r}")
        limit = np.iinfo(np.int32).max if self.vocab_size is None else self.vocab_size
        if wrong := [token for token in tokens if not 0 <= token < limit]:
            raise InputError(f"token {wrong[0]} is not in the vocabulary of {limit} tokens")
        return Document(tokens=_array(tokens), start=int(start))

    def _of_pair(self, prompt: str, answer: Any) -> Document:
        before = encode(prompt, self.tokenizer)
        # Without special tokens: the target continues the prompt's own tokens.
        after = [] if answer is None else self._ended(self._tokens(_text("the answer", answer), special=False))
        return Document(tokens=_array([*before, *after]), start=len(before))

    def _of_conversation(self, messages: Sequence[Mapping[str, Any]]) -> Iterator[Document]:
        for place, message in enumerate(messages):
            if message["role"] == "assistant" and place:
                before = encode(messages[:place], self.tokenizer)
                answer = self._answer(messages[: place + 1], before, last=place + 1 == len(messages))
                yield Document(tokens=_array([*before, *answer]), start=len(before))
        if messages[-1]["role"] != "assistant":
            before = encode(messages, self.tokenizer)
            yield Document(tokens=_array(before), start=len(before))

    def _answer(self, messages: Sequence[Mapping[str, Any]], before: Sequence[int], last: bool) -> list[int]:
        """Tokens of the last message, as the target says them after the prompt."""
        if self.tokenizer is None:
            raise InputError(NO_TOKENIZER)
        try:
            whole = self.tokenizer.apply_chat_template(list(messages), return_dict=False)
        except Exception as error:
            raise InputError(f"the chat template makes no text of these messages: {error}") from error
        if list(whole[: len(before)]) == list(before):
            answer = list(whole[len(before) :])
        else:
            # Some templates write a past answer otherwise than the target says it.
            answer = self._tokens(str(messages[-1]["content"]), special=False)
            last = True
        end = self.tokenizer.eos_token_id
        if end in answer:
            # What a template writes behind the end token belongs to the next turn.
            return answer[: len(answer) - answer[::-1].index(end)]
        return self._ended(answer) if last else answer

    def _tokens(self, text: str, special: bool = True) -> list[int]:
        if self.tokenizer is None:
            raise InputError(NO_TOKENIZER)
        # Not verbose: it would warn of texts that are longer than the model's context.
        return list(self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    def _ended(self, tokens: list[int]) -> list[int]:
        """The tokens with the end token behind them, where the tokenizer has one."""
        end = None if self.tokenizer is None else self.tokenizer.eos_token_id
        return tokens if end is None or tokens[-1:] == [end] else [*tokens, end]


def _shape(fields: Mapping[str, Any], conversation: RecordedConversation | None) -> RecordShape:
    """What a record was taken for."""
    if "tokens" in fields:
        return RecordShape(one="list of token ids", many="lists of token ids")
    if conversation is not None:
        return conversation.shape
    if "prompt" not in fields:
        return RecordShape(one="text", many="texts")
    if any(name in fields for name in ANSWERS):
        return RecordShape(one="prompt with its answer", many="prompts with their answers")
    return RecordShape(one="prompt", many="prompts")


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InputError(f"{name} must be a text, got {reprlib.repr(value)}")
    return value


def _array(tokens: Sequence[int]) -> Any:
    return np.array(tokens, dtype=np.int64)
