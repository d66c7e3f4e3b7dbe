"""From the body of a request to the jobs of its outputs."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from starlette.requests import Request

from outrider.core.constraint import Constraint
from outrider.core.inputs import InputError, shown
from outrider.engine.generation import Generation
from outrider.engine.requests import nth
from outrider.engine.text import Ending
from outrider.serve.api.bodies import GenerationBody
from outrider.serve.api.chat_prompt import text_of
from outrider.serve.api.errors import ApiError, of_input, refuse
from outrider.serve.api.formats import field_of, grammar_of
from outrider.serve.api.gateway import Gateway
from outrider.serve.api.options import check_keys, check_limits, generation_of, sampling_of
from outrider.serve.api.outputs import OutputStream
from outrider.serve.api.speculation import speculation
from outrider.serve.ids import request_id
from outrider.serve.run.job import OutputTask
from outrider.serve.run.parser import OutputReader, PlainReader

Wrap = Callable[[Constraint, frozenset[int], Sequence[int]], Constraint]
"""Puts a constraint behind something, such as the reasoning, given the end tokens and a prompt."""
Asked = TypeVar("Asked", bound=GenerationBody)
PRIORITIES = ("x-outrider-priority", "x-vllm-priority")


@contextlib.contextmanager
def named(gateway: Gateway, request: Request, body: GenerationBody) -> Iterator[str]:
    """The name of a request: that of its header, of its body, or a new one. It is taken until the call with this name
    is closed, or until the block fails.
    """
    own = request.headers.get("x-request-id") is None and body.request_id is not None
    id = gateway.unique(request_id(body.request_id) if own else request.scope["state"]["request_id"])
    gateway.running.add(id)
    try:
        yield id
    except BaseException:
        gateway.running.discard(id)
        raise


def check(gateway: Gateway, request: Request, body: Asked) -> Asked:
    """The body with what headers say. Raises ApiError for whatever cannot be followed."""
    gateway.check_model(body.model)
    for name in PRIORITIES:
        if (given := request.headers.get(name)) is not None:
            if not given.strip().lstrip("-").isdecimal() or len(given) > 9:
                refuse("priority", f"{name} must be a whole number, got {shown(given)}")
            body = body.model_copy(update={"priority": int(given)})
    gateway.note_unknown(body.model_extra or ())
    check_keys(body)
    check_limits(body, gateway)
    return body


def fitted(prompt: Sequence[int], body: GenerationBody, gateway: Gateway, param: str) -> tuple[int, ...]:
    """The prompt, cut as the request wants it. Raises ApiError if there is no room for an output."""
    longest, cut = gateway.service.max_context, body.truncate_prompt_tokens
    if cut is not None:
        most = longest - 1 if cut == -1 else cut
        if not 1 <= most < longest:
            refuse("truncate_prompt_tokens", f"truncate_prompt_tokens must be -1 or 1 .. {longest - 1}, got {cut}")
        prompt = prompt[-most:] if body.truncation_side == "left" else prompt[:most]
    if not prompt:
        refuse(param, "the prompt is empty; give at least one token")
    if len(prompt) >= longest:
        refuse(
            param,
            f"the prompt has {len(prompt)} tokens, and the context of this server {longest}, of which at least one is "
            "the output's; shorten the prompt, or give truncate_prompt_tokens",
            "context_length_exceeded",
        )
    width = gateway.service.engine.parts.target.vocab_size
    if wrong := [token for token in prompt if not 0 <= token < width]:
        refuse(param, f"token id {shown(wrong[0])} is not in 0 .. {width - 1}")
    return tuple(prompt)


async def choices_of(
    gateway: Gateway,
    request: Request,
    body: GenerationBody,
    id: str,
    prompts: Sequence[tuple[int, ...]],
    *,
    reader: Callable[[Sequence[int]], OutputReader] | None = None,
    wrap: Wrap | None = None,
) -> list[OutputStream]:
    """The outputs of a request, in the order of its answer: those of one prompt follow each other.

    Args:
        reader: Makes the reader of an output, given its prompt. By default all text is content.
        wrap: Changes the constraint.
    """
    service, began, key = gateway.service, time.monotonic(), request.scope["state"]["key"]
    sampling = sampling_of(body, service.engine.sampling)
    asked, constraint = speculation(body), await _constraint(gateway, body)
    predicted = await _prediction(gateway, body)
    reads_raw = reader is not None or not body.skip_special_tokens
    hidden = frozenset[int]() if not body.skip_special_tokens else gateway.reading.hidden
    found: list[OutputStream] = []
    for place, prompt in enumerate(prompts):
        options = generation_of(body, gateway, room=service.max_context - len(prompt))
        options = replace(options, prediction=predicted)
        if constraint is not None:
            ends = service.engine.ends(options)
            options = replace(options, constraint=constraint if wrap is None else wrap(constraint, ends, prompt))
        for k in range(body.n):
            job = OutputTask(
                id=f"{id}-{len(found)}",
                prompt=prompt,
                options=replace(options, sampling=nth(sampling, k)),
                priority=body.priority,
                speculation=asked,
                include_stop=body.include_stop_str_in_output,
                owner=None if key is None else str(key),
                deadline=began + service.limits.request_timeout,
            )
            found.append(
                OutputStream(
                    index=len(found),
                    prompt=place,
                    job=job,
                    reader=PlainReader() if reader is None else reader(prompt),
                    raw=_raw(gateway, options, hidden, include_stop=job.include_stop) if reads_raw else None,
                )
            )
    return found


def _raw(gateway: Gateway, options: Generation, hidden: frozenset[int], *, include_stop: bool) -> Ending:
    """The text of an output with special tokens. It ends where the engine ends the output."""
    service = gateway.service
    return Ending(
        service.tokenizer,
        service.engine.stops(options),
        include_stop=include_stop,
        min_tokens=options.min_tokens,
        hidden=hidden,
    )


async def _prediction(gateway: Gateway, body: GenerationBody) -> tuple[int, ...]:
    """The text that the client predicts, as token ids. Raises ApiError for parts that are no text."""
    if body.prediction is None:
        return ()
    text = text_of(body.prediction.content, "prediction.content")
    return tuple(await gateway.service.encode(text, special=False))


async def _constraint(gateway: Gateway, body: GenerationBody) -> Constraint | None:
    """The form of the outputs, compiled. Raises ApiError if it is wrong or takes too long."""
    grammar = grammar_of(body, gateway.service.limits, gateway.reading.call_marks)
    if grammar is None:
        return None
    options = Generation(ignore_eos=body.ignore_eos, stop_token_ids=tuple(body.stop_token_ids))
    try:
        return await gateway.service.bind(grammar, options)
    except InputError as error:
        found = of_input(error)
        raise ApiError(400, found.message, param=found.param or field_of(body)) from None
