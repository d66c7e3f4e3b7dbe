"""POST /v1/completions."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from outrider.core.inputs import shown
from outrider.serve.api.bodies import CompletionBody, read
from outrider.serve.api.call import ChoicesWriter, respond, while_there
from outrider.serve.api.gateway import Gateway, gateway_of
from outrider.serve.api.openapi import POSTED, body_of
from outrider.serve.api.request import RequestPrompt, admit, answer_format, request_of
from outrider.serve.api.sse import BLANK, IDS, Form
from outrider.serve.api.tokens import Offsets
from outrider.serve.errors import refuse, refuse_key
from outrider.serve.run.outputs import Delta, OutputStream

router = APIRouter()
USUAL_MOST = 16
"""Most tokens of an output whose request does not say."""


@router.post("/v1/completions", responses=POSTED, openapi_extra=body_of(CompletionBody))
async def complete(request: Request) -> Response:
    """Continue texts or lists of token ids."""
    gateway = gateway_of(request)
    body = await read(request, CompletionBody, gateway.service.limits)
    admit(gateway, request, body)
    if body.best_of is not None and body.best_of != body.n:
        refuse_key("best_of", "each of the n outputs is returned; leave it out")
    if body.suffix:
        refuse_key("suffix", "text is continued, not filled in between two texts")
    most_tokens = USUAL_MOST if body.max_tokens is None else body.max_tokens
    if most_tokens == 0 and not body.echo:
        refuse("max_tokens", "max_tokens must be >= 1; 0 is for completions with echo, got 0")
    format = answer_format(body, gateway.service.limits, logprobs=body.logprobs, param="logprobs")
    asked = await request_of(
        gateway,
        body,
        await _prompts(gateway, body),
        most_tokens=most_tokens,
        format=replace(format, echo=body.echo),
        response_format=body.response_format,
    )
    counts = (body.logprobs if body.echo else None, body.prompt_logprobs)
    most = max((count for count in counts if count is not None), default=None)
    if most is not None:
        asked = replace(asked, prompts=await while_there(request, _scored(gateway, asked.prompts, most)))
    return await respond(gateway, request, asked, CompletionWriter)


@dataclass(kw_only=True)
class _Part:
    """What deltas of one output bring, put together.

    Attributes:
        tokens: Those that have log-probabilities: the prompt's among them, if it is echoed.
        new: The tokens of the output alone.
    """

    text: str
    tokens: list[int]
    new: list[int]
    logprobs: list[Any]
    top: list[Any]

    @classmethod
    def of(cls, deltas: Sequence[Delta]) -> "_Part":
        tokens = [token for delta in deltas for token in delta.tokens]
        return cls(
            text="".join([delta.text for delta in deltas]),
            tokens=tokens,
            new=tokens,
            logprobs=[each for delta in deltas for each in delta.logprobs],
            top=[each for delta in deltas for each in delta.top],
        )


@dataclass
class CompletionWriter(ChoicesWriter):
    """Writes a completion, or its chunks."""

    kinds, prefix = ("text_completion", "text_completion"), "cmpl"
    _deltas: defaultdict[int, list[Delta]] = field(default_factory=lambda: defaultdict(list))
    # Where the tokens of each output begin, if log-probabilities are asked for.
    _offsets: dict[int, Offsets] = field(default_factory=dict)

    @cached_property
    def _echoes(self) -> list[str]:
        """What each prompt is as text, if it is echoed."""
        decode = self.gateway.service.tokenizer.decode
        prompts = self.call.request.prompts if self.format.echo else []
        texts = [(each.tokens, each.text) for each in prompts]
        return [str(decode(list(ids), skip_special_tokens=False)) if text is None else text for ids, text in texts]

    def begin(self) -> list[bytes]:
        """The chunks of prompts that are only echoed. Forms of events are made, where only text and ids differ."""
        format, outputs = self.format, self.call.outputs
        if format.logprobs is None and not format.counts:
            blank = _Part(text=BLANK, tokens=[], new=[], logprobs=[], top=[])
            for output in outputs:
                choice = self._choice(output, blank, begins=False, ended=False)
                shown = choice | {"token_ids": IDS} if format.token_ids else choice
                self._forms.append(Form(self._chunk(output, shown)))
        if self.call.request.most_tokens == 0:
            return [
                self._event(output, self._echoed(output, _Part.of([])), begins=True, ended=True) for output in outputs
            ]
        return []

    def add(self, delta: Delta) -> list[bytes]:
        """The chunk of a delta, if it brings anything."""
        ended = delta.end is not None
        if delta.first:
            return [self._event(delta.output, self._echoed(delta.output, _Part.of([delta])), begins=True, ended=ended)]
        if not (delta.pieces or self.format.token_ids or ended or (delta.logprobs and not self._forms)):
            return []
        if self._forms and not ended:
            return [self._forms[delta.output.index].filled(delta.text, delta.tokens)]
        return [self._event(delta.output, _Part.of([delta]), begins=False, ended=ended)]

    def take(self, delta: Delta) -> None:
        """Note a delta of an answer that comes at once."""
        self._deltas[delta.output.index].append(delta)

    def whole(self) -> dict[str, Any]:
        """The answer at once."""
        outputs = self.call.outputs
        self._offsets.clear()
        parts = [self._echoed(output, _Part.of(self._deltas[output.index])) for output in outputs]
        return self._answer([self._choice(*each, begins=True, ended=True) for each in zip(outputs, parts, strict=True)])

    def _echoed(self, output: OutputStream, part: _Part) -> _Part:
        """The first part of an output, behind the prompt if it is echoed."""
        format, prompt = self.format, self.call.request.prompts[output.prompt]
        if format.echo:
            part.text = self._echoes[output.prompt] + part.text
            if format.logprobs is not None and prompt.scores is not None:
                part.tokens = [*prompt.tokens, *part.tokens]
                part.logprobs = [*prompt.scores.token_logprobs, *part.logprobs]
                part.top = [*(_likeliest(each, format.logprobs) for each in prompt.scores.top), *part.top]
        return part

    def _event(self, output: OutputStream, part: _Part, *, begins: bool, ended: bool) -> bytes:
        return self._chunk(output, self._choice(output, part, begins=begins, ended=ended), ended=ended)

    def _choice(self, output: OutputStream, part: _Part, *, begins: bool, ended: bool) -> dict[str, Any]:
        format, prompt = self.format, self.call.request.prompts[output.prompt]
        vocabulary, end = self.gateway.vocabulary, output.end if ended else None
        choice: dict[str, Any] = {"index": output.index, "text": part.text, "logprobs": None}
        if format.logprobs is not None:
            choice["logprobs"] = vocabulary.old_logprobs(
                part.tokens,
                part.logprobs,
                part.top,
                offsets=self._offsets_of(output, part),
                as_ids=format.as_ids,
            )
        choice["finish_reason"] = ("length" if end is None else end.reason) if ended else None
        choice["stop_reason"] = None if end is None else end.stopped_by
        if format.token_ids:
            choice["token_ids"] = part.new
            if begins:
                choice["prompt_token_ids"] = list(prompt.tokens)
        if format.prompt_logprobs is not None and prompt.scores is not None:
            top = [_likeliest(each, format.prompt_logprobs) for each in prompt.scores.top]
            choice["prompt_logprobs"] = vocabulary.prompt_logprobs(prompt.tokens, prompt.scores.token_logprobs, top)
        return choice

    def _offsets_of(self, output: OutputStream, part: _Part) -> list[int]:
        """Where tokens begin in the text of an output, which is behind the prompt if it is echoed."""
        tokenizer, request = self.gateway.service.tokenizer, self.call.request
        start = len(self._echoes[output.prompt]) if self.format.echo else 0
        if output.index not in self._offsets:
            self._offsets[output.index] = Offsets(tokenizer, special=request.raw, start=start)
        echoed = Offsets(tokenizer, special=True)
        offsets = echoed.add(part.tokens[: len(part.tokens) - len(part.new)])
        # What the tokenizer adds at the beginning is no text of the prompt.
        added = max(0, echoed.end - start)
        return [max(0, each - added) for each in offsets] + self._offsets[output.index].add(part.new)


async def _prompts(gateway: Gateway, body: CompletionBody) -> list[RequestPrompt]:
    """The prompts as token ids, and as the texts that they came as."""
    service, most = gateway.service, gateway.service.limits.max_prompts
    is_one = isinstance(body.prompt, str) or (body.prompt and isinstance(body.prompt[0], int))
    listed: Sequence[Any] = [body.prompt] if is_one else body.prompt
    if not 0 < len(listed) <= most:
        refuse("prompt", f"prompt must hold 1 .. {most} prompts, got {shown(len(listed))}")
    prompts = []
    for each in listed:
        if isinstance(each, str):
            tokens = await service.encode(each, special=body.add_special_tokens)
            prompts.append(RequestPrompt(tokens=tuple(tokens), text=each))
        else:
            prompts.append(RequestPrompt(tokens=tuple(each)))
    return prompts


async def _scored(gateway: Gateway, prompts: Sequence[RequestPrompt], count: int) -> list[RequestPrompt]:
    """The prompts with their log-probabilities, and with those of the likeliest tokens."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(gateway.service.score(prompt.tokens, count)) for prompt in prompts]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [replace(prompt, scores=task.result()) for prompt, task in zip(prompts, tasks, strict=True)]


def _likeliest(top: Mapping[int, float] | None, count: int) -> Mapping[int, float] | None:
    """The likeliest ones of a position's tokens."""
    if top is None or len(top) <= count:
        return top
    return dict(sorted(top.items(), key=lambda each: -each[1])[:count])
