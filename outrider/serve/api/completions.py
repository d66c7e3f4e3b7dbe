"""POST /v1/completions."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from outrider.core.inputs import shown
from outrider.engine.output import PromptLogprobs
from outrider.serve.api.answers import answered, failed, streamed
from outrider.serve.api.bodies import CompletionBody
from outrider.serve.api.calls import Call, while_there
from outrider.serve.api.errors import refuse, refuse_key
from outrider.serve.api.gateway import Gateway, gateway_of
from outrider.serve.api.jobs import check, choices_of, fitted, named
from outrider.serve.api.openapi import POSTED, body_of
from outrider.serve.api.options import logprobs_of, most_tokens
from outrider.serve.api.outputs import Interval, OutputPart, OutputStream, metrics_of, usage_of, usage_so_far
from outrider.serve.api.sse import BLANK, DONE, IDS, Form, event
from outrider.serve.api.tokens import Offsets, OldLogprobs

router = APIRouter()


@dataclass(frozen=True, kw_only=True)
class Told:
    """What is known of a prompt besides its outputs.

    Attributes:
        text: The prompt as text.
        scores: Its log-probabilities, if anything asks for them.
    """

    text: str
    scores: PromptLogprobs | None


@router.post("/v1/completions", responses=POSTED, openapi_extra=body_of(CompletionBody))
async def complete(request: Request) -> Response:
    """Continue texts or lists of token ids."""
    gateway = gateway_of(request)
    body = check(gateway, request, await gateway.read(request, CompletionBody))
    _check(body)
    completion = await Completion.begun(gateway, request, body)
    if body.stream:
        return streamed(gateway, completion.call, completion.events(), failed)
    return await answered(request, completion.call, completion.answer)


@dataclass(kw_only=True)
class Completion:
    """A completion that is being answered.

    Attributes:
        offsets: Where the tokens of each output begin, if log-probabilities are asked for.
    """

    gateway: Gateway
    body: CompletionBody
    id: str
    created: int
    told: Sequence[Told]
    choices: Sequence[OutputStream]
    call: Call
    offsets: dict[int, Offsets] = field(default_factory=dict)

    @classmethod
    async def begun(cls, gateway: Gateway, request: Request, body: CompletionBody) -> "Completion":
        """The completion, with its outputs queued."""
        prompts, texts = await _prompts(gateway, body)
        with named(gateway, request, body) as id:
            choices = await choices_of(gateway, request, body, id, prompts)
            scores = await while_there(request, _scores(gateway, body, prompts))
            call = Call.submit(gateway, request, id, [] if most_tokens(body) == 0 else choices)
        return cls(
            gateway=gateway,
            body=body,
            id=f"cmpl-{id}",
            created=int(time.time()),
            told=[Told(text=text, scores=score) for text, score in zip(texts, scores, strict=True)],
            choices=choices,
            call=call,
        )

    async def answer(self) -> dict[str, Any]:
        """The whole answer."""
        parts: list[list[OutputPart]] = [[] for _ in self.choices]
        async for choice, part in self.call.parts():
            parts[choice.index].append(part)
        found = [self._choice(choice, self._opening(choice, parts[choice.index])) for choice in self.choices]
        return self._object(found) | {
            "usage": usage_of(self.choices),
            "system_fingerprint": self.gateway.fingerprint,
            "metrics": metrics_of(self.gateway, self.choices),
        }

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as a stream."""
        options, body = self.body.stream_options, self.body
        intervals = [Interval(body.stream_interval) for _ in self.choices]
        begun = set[int]()
        forms = self._forms()
        for choice in self.choices if most_tokens(body) == 0 else ():
            yield event(self._chunk(choice, self._opening(choice, [])))
        async for choice, part in self.call.parts():
            due = intervals[choice.index].add(part)
            if due is None:
                continue
            begins = choice.index not in begun
            if begins:
                begun.add(choice.index)
                opened = self._opening(choice, [due])
            elif forms and not due.ended:
                if due.pieces or body.return_token_ids:
                    yield forms[choice.index].filled("".join([piece.text for piece in due.pieces]), due.tokens)
                continue
            elif due.pieces or due.ended or due.own or body.return_token_ids:
                opened = _Opened.of([due])
            else:
                continue
            yield event(self._chunk(choice, opened, begins=begins))
        if options is not None and options.include_usage:
            last = {"usage": usage_of(self.choices), "metrics": metrics_of(self.gateway, self.choices)}
            yield event(self._object([]) | last)
        yield DONE

    def _forms(self) -> list[Form]:
        """The events of each output's text, where nothing but text and token ids differs; otherwise none."""
        body, options = self.body, self.body.stream_options
        counts = options is not None and options.continuous_usage_stats
        if body.logprobs is not None or body.prompt_logprobs is not None or counts:
            return []
        opened, found = _Opened(text=BLANK, tokens=[], new=[], own=[], top=[], ended=False), []
        for choice in self.choices:
            value = self._choice(choice, opened, begins=False, ended=False)
            if body.return_token_ids:
                value["token_ids"] = IDS
            found.append(Form(self._object([value])))
        return found

    def _opening(self, choice: OutputStream, parts: Sequence[OutputPart]) -> "_Opened":
        """What parts bring, behind the prompt if it is echoed."""
        found = _Opened.of(parts)
        if not self.body.echo:
            return found
        told, prompt = self.told[choice.prompt], choice.job.prompt
        found.text = told.text + found.text
        if self.body.logprobs is not None and told.scores is not None:
            found.tokens = [*prompt, *found.tokens]
            found.own = [*told.scores.own, *found.own]
            found.top = [*(_likeliest(each, self.body.logprobs) for each in told.scores.top), *found.top]
        return found

    def _chunk(self, choice: OutputStream, opened: "_Opened", *, begins: bool = True) -> dict[str, Any]:
        ended = opened.ended or most_tokens(self.body) == 0
        found = self._choice(choice, opened, begins=begins, ended=ended)
        chunk = self._object([found])
        options = self.body.stream_options
        if options is not None and options.continuous_usage_stats:
            chunk["usage"] = usage_so_far(choice)
        if ended:
            chunk["system_fingerprint"] = self.gateway.fingerprint
        return chunk

    def _offsets(self, choice: OutputStream, opened: "_Opened") -> list[int]:
        """Where tokens begin in the text of an output, which is behind the prompt if it is echoed."""
        told, tokenizer = self.told[choice.prompt].text if self.body.echo else "", self.gateway.service.tokenizer
        if choice.index not in self.offsets:
            special = not self.body.skip_special_tokens
            self.offsets[choice.index] = Offsets(tokenizer, special=special, start=len(told))
        prompt = opened.tokens[: len(opened.tokens) - len(opened.new)]
        echoed = Offsets(tokenizer, special=True)
        found = echoed.add(prompt)
        # What the tokenizer adds at the beginning is no text of the prompt.
        added = max(0, echoed.end - len(told))
        return [max(0, each - added) for each in found] + self.offsets[choice.index].add(opened.new)

    def _choice(
        self, choice: OutputStream, opened: "_Opened", *, begins: bool = True, ended: bool = True
    ) -> dict[str, Any]:
        body, told = self.body, self.told[choice.prompt]
        logprobs: OldLogprobs | None = None
        if body.logprobs is not None:
            logprobs = self.gateway.vocabulary.old_logprobs(
                opened.tokens,
                opened.own,
                opened.top,
                offsets=self._offsets(choice, opened),
                as_ids=body.return_tokens_as_token_ids,
            )
        found: dict[str, Any] = {
            "index": choice.index,
            "text": opened.text,
            "logprobs": logprobs,
            "finish_reason": (choice.finish_reason or "length") if ended else None,
            "stop_reason": choice.stop_reason if ended else None,
        }
        if body.return_token_ids:
            found["token_ids"] = opened.new
            if begins:
                found["prompt_token_ids"] = list(choice.job.prompt)
        if body.prompt_logprobs is not None and told.scores is not None:
            top = [_likeliest(each, body.prompt_logprobs) for each in told.scores.top]
            own = told.scores.own
            found["prompt_logprobs"] = self.gateway.vocabulary.prompt_logprobs(choice.job.prompt, own, top)
        return found

    def _object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.gateway.name,
            "choices": choices,
        }


@dataclass(kw_only=True)
class _Opened:
    """What parts bring, put together; changes in place. `new` are the tokens of the output alone."""

    text: str
    tokens: list[int]
    new: list[int]
    own: list[Any]
    top: list[Any]
    ended: bool

    @classmethod
    def of(cls, parts: Sequence[OutputPart]) -> "_Opened":
        tokens = [token for part in parts for token in part.tokens]
        return cls(
            text="".join(piece.text for part in parts for piece in part.pieces),
            tokens=tokens,
            new=tokens,
            own=[each for part in parts for each in part.own],
            top=[each for part in parts for each in part.top],
            ended=any(part.ended for part in parts),
        )


def _check(body: CompletionBody) -> None:
    """Raise ApiError for fields of completions that cannot be followed."""
    if body.best_of is not None and body.best_of != body.n:
        refuse_key("best_of", "each of the n outputs is returned; leave it out")
    if body.suffix:
        refuse_key("suffix", "text is continued, not filled in between two texts")


async def _prompts(gateway: Gateway, body: CompletionBody) -> tuple[list[tuple[int, ...]], list[str]]:
    """The prompts as token ids and as texts."""
    given, most = body.prompt, gateway.service.limits.max_prompts
    listed: Sequence[Any] = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    if not 0 < len(listed) <= most:
        refuse("prompt", f"prompt must hold 1 .. {most} prompts, got {shown(len(listed))}")
    prompts, texts = [], []
    for each in listed:
        ids = await gateway.service.encode(each, special=body.add_special_tokens) if isinstance(each, str) else each
        fit = fitted(ids, body, gateway, "prompt")
        whole = isinstance(each, str) and len(fit) == len(ids)
        prompts.append(fit)
        texts.append(each if whole else _decoded(gateway, fit) if body.echo else "")
    return prompts, texts


async def _scores(
    gateway: Gateway, body: CompletionBody, prompts: Sequence[tuple[int, ...]]
) -> Sequence[PromptLogprobs | None]:
    """The log-probabilities of prompts, if anything asks for them."""
    echoed = logprobs_of(body, gateway.service.limits.max_logprobs) if body.echo else None
    asked = [each for each in (echoed, body.prompt_logprobs) if each is not None]
    if not asked:
        return [None] * len(prompts)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(gateway.service.score(prompt, max(asked))) for prompt in prompts]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _decoded(gateway: Gateway, prompt: Sequence[int]) -> str:
    return str(gateway.service.tokenizer.decode(list(prompt), skip_special_tokens=False))


def _likeliest(top: Any, count: int) -> Any:
    """The likeliest ones of a position's tokens."""
    if top is None or len(top) <= count:
        return top
    return dict(sorted(top.items(), key=lambda each: -each[1])[:count])
