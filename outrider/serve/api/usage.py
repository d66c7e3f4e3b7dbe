"""What a request used: its tokens, and its speed as vLLM's clients read it."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, TypedDict

from outrider import catalog
from outrider.decoding.protocol import Parts
from outrider.drafters.none import NoDrafter
from outrider.engine.output import Output
from outrider.serve.api.gateway import Gateway
from outrider.serve.observe.record import OutputTally
from outrider.serve.run.outputs import OutputStream, RequestSpeculation


class PromptDetails(TypedDict):
    """Of the prompt's tokens."""

    cached_tokens: int


class CompletionDetails(TypedDict):
    """Of the output's tokens."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class TokenUsage(TypedDict):
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


def usage(
    prompt: int, completion: int, *, cached: int = 0, reasoning: int = 0, accepted: int = 0, rejected: int = 0
) -> TokenUsage:
    """The numbers of tokens of a request.

    Args:
        accepted: Accepted draft tokens of the client's prediction.
        rejected: Rejected draft tokens of the client's prediction.
    """
    return TokenUsage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptDetails(cached_tokens=cached),
        completion_tokens_details=CompletionDetails(
            reasoning_tokens=reasoning, accepted_prediction_tokens=accepted, rejected_prediction_tokens=rejected
        ),
    )


def usage_of(outputs: Sequence[OutputStream]) -> TokenUsage:
    """The numbers of tokens of a whole request. A prompt counts once, however many outputs it has."""
    prompts = {output.prompt: output for output in reversed(outputs)}.values()
    results = [output.output for output in outputs if output.output is not None]
    return usage(
        sum(len(output.task.prompt) for output in prompts),
        sum(len(output.tokens) for output in outputs),
        cached=sum(output.cached for output in prompts),
        reasoning=sum(output.reasoning_tokens for output in outputs),
        accepted=sum(each.accepted_prediction_tokens for each in results),
        rejected=sum(each.rejected_prediction_tokens for each in results),
    )


def usage_so_far(output: OutputStream) -> TokenUsage:
    """The numbers of tokens of one output."""
    return usage(len(output.task.prompt), len(output.tokens), cached=output.cached, reasoning=output.reasoning_tokens)


def metrics_of(gateway: Gateway, outputs: Sequence[OutputStream]) -> dict[str, Any] | None:
    """The speed of a request; None if it has several outputs or nobody wants to know. Times are milliseconds, with
    vLLM's meanings: the first token is timed from the start of the prompt, not from the request's arrival.
    """
    detail, one = gateway.settings.request_metrics, outputs[0]
    if detail == "none" or len(outputs) > 1 or one.output is None or one.times is None:
        return None
    tally, times, output, asked = one.tally, one.times, one.output, one.task.speculation
    parts, tokens = gateway.service.engine.parts, len(output.tokens)
    admitted = times.queued if times.admitted is None else times.admitted
    first = times.last if times.first is None else times.first
    timed = first is not None and times.last is not None
    generation = times.last - first if timed and times.last is not None and first is not None else 0.0
    total = times.last - admitted if times.last is not None else 0.0
    return {
        "time_to_first_token_ms": None if first is None else 1000 * (first - admitted),
        "generation_time_ms": 1000 * generation,
        "queue_time_ms": 1000 * (admitted - times.queued),
        "mean_itl_ms": 1000 * generation / (tokens - 1) if tokens > 1 else None,
        "tokens_per_second": tokens / total if total > 0 else None,
        "speculative_decoding": speculative(tally, parts, asked, detail),
        "outrider": _outrider_metrics(tally, output, parts, asked),
    }


def speculative(
    tally: OutputTally, parts: Parts, asked: RequestSpeculation, detail: Literal["summary", "detailed"]
) -> dict[str, Any] | None:
    """The speculation of one output in vLLM's fields; None if there is none. Steps that drafted nothing do not count.

    Of trees, draft tokens are nodes and the histogram counts depths.
    """
    if isinstance(parts.drafter, NoDrafter) or asked.off:
        return None
    pairs = [(drafted, accepted) for drafted, accepted in zip(tally.drafted, tally.accepted, strict=True) if drafted]
    drafted, accepted = [each[0] for each in pairs], [each[1] for each in pairs]
    most = getattr(parts.length, "most", None)
    deepest = int(most) if most is not None else parts.length.limit(parts.length.open())
    depth = max([deepest if asked.max_tokens is None else min(deepest, asked.max_tokens), *accepted])
    steps = Counter(accepted)
    counts = {
        "mean_acceptance_length": 1 + sum(accepted) / len(pairs) if pairs else 1.0,
        "draft_acceptance_rate": sum(accepted) / sum(drafted) if pairs else 0.0,
        "acceptance_histogram": [steps[length] for length in range(depth + 1)],
        "num_spec_steps": len(pairs),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(drafted),
        "num_spec_tokens": depth,
    }
    return counts | {"per_step_accepted": accepted, "per_step_drafted": drafted} if detail == "detailed" else counts


def _outrider_metrics(tally: OutputTally, output: Output, parts: Parts, asked: RequestSpeculation) -> dict[str, Any]:
    steps = len(tally.drafted)
    plain = tally.drafted.count(0)
    return {
        "steps": steps,
        "plain_steps": plain,
        "tokens_per_step": tally.emitted / steps if steps else None,
        "block_efficiency": output.block_efficiency,
        "verifier": asked.verifier or catalog.name_of(parts.verifier),
        "tree": asked.tree or catalog.name_of(parts.tree),
        "drafter": asked.drafter or catalog.name_of(parts.drafter),
        "lengths": {str(length): count for length, count in sorted(Counter(tally.drafted).items())},
        "drafter_seconds": tally.drafter_seconds,
        "target_seconds": tally.target_seconds,
    }
