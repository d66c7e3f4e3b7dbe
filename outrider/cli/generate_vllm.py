"""outrider generate --engine vllm: the same prompts and the same records, from a vLLM that is started for them."""

import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import typer
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from outrider.assembly import completed, tokenizer_of
from outrider.cli.failure import INTERRUPTED
from outrider.cli.generate import GenerateTask, TaskResults, complain_of, held_outputs
from outrider.cli.outputs import Wanted
from outrider.cli.printed import print_line, print_measures
from outrider.cli.prompts import PromptEntry, entries
from outrider.cli.request_body import body_of
from outrider.core import progress
from outrider.core.inputs import LARGEST, InputError
from outrider.engine.generation import Generation
from outrider.engine.output import FinishReason, Output
from outrider.engine.prompts import encode
from outrider.engine.requests import check_count
from outrider.serve.client.answers import places
from outrider.serve.client.remote import Remote
from outrider.serve.vllm.counters import Acceptance
from outrider.serve.vllm.launch import check_request
from outrider.serve.vllm.options import EngineOptions
from outrider.serve.vllm.process import VllmProcess

AT_ONCE = 256
"""Most requests that wait for vLLM at once; it batches them as it likes."""
LARGEST_SEED = 2**63 - 1
"""vLLM's seeds have a bit less than ours."""
REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "cancelled"}


@dataclass(frozen=True, kw_only=True)
class Ask:
    """How vLLM is asked for an output.

    Attributes:
        fields: Of every request.
    """

    remote: Remote
    model: str
    tokenizer: PreTrainedTokenizerBase
    fields: Mapping[str, Any]

    def body(self, entry: PromptEntry, sample: int) -> dict[str, Any]:
        """The body for an output of a prompt. Raises InputError where there is no prompt."""
        if entry.prompt is None:
            raise entry.error or InputError(f"{entry.place} is empty")
        prompt = encode(entry.prompt, self.tokenizer)
        body: dict[str, Any] = {"model": self.model, "prompt": prompt, "return_token_ids": True} | dict(self.fields)
        if body.get("seed") is not None:
            # Each output of a prompt has draws of its own.
            body["seed"] = ((int(body["seed"]) + sample) & LARGEST) & LARGEST_SEED
        return body

    def output(self, entry: PromptEntry, wanted: Wanted) -> Output:
        """An output, when it has ended."""
        body, began = self.body(entry, wanted.sample_index), time.monotonic()
        answer = self.remote.post("/v1/completions", body)
        return output_of(answer, answer["choices"][0], str(wanted.index), time.monotonic() - began)


def run(task: GenerateTask, engine: EngineOptions) -> None:
    """Make the outputs of a task with vLLM, and print or write each as it ends."""
    for name, asked in (("--learn", task.learn.learn), ("--profile", task.profile), ("--compare", task.compare)):
        if asked:
            raise InputError(f"{name} is about Outrider's own engine; leave it out with --engine vllm")
    prompts = entries(task.texts, task.file)
    check_count(task.n, len(prompts))
    with held_outputs(task, prompts) as wanted:
        if wanted:
            _make(task, engine, prompts, wanted)


def _make(task: GenerateTask, engine: EngineOptions, prompts: Sequence[PromptEntry], wanted: Sequence[Wanted]) -> None:
    """Start vLLM, and let it make the outputs that are wanted."""
    tokenizer = tokenizer_of(completed(task.setup))
    if tokenizer is None:
        raise InputError("there is no tokenizer beside the target, and a text needs one; name it with --tokenizer")
    fields = body_of(task.request)
    fields.setdefault("max_tokens", Generation.max_new_tokens)
    if task.logprobs is not None:
        fields |= {"logprobs": task.logprobs, "return_tokens_as_token_ids": True}
    process = engine.process(task.setup, engine.vllm_python)
    try:
        check_request(fields, process.launch, process.python)
        made = TaskResults(task=task)
        with process:
            card = process.remote.models()[0]
            ask = Ask(remote=process.remote, model=str(card["id"]), tokenizer=tokenizer, fields=fields)
            before = Acceptance.of_metrics(process.remote.text("/metrics"))
            if len(prompts) == len(wanted) == 1 and not task.as_json and task.output is None:
                _stream(ask, prompts[0], wanted[0], made)
            else:
                _together(ask, prompts, wanted, made)
                complain_of(made)
            _report(process, before, made)
    finally:
        process.stop()
    raise typer.Exit(made.status)


def _stream(ask: Ask, entry: PromptEntry, wanted: Wanted, made: TaskResults) -> None:
    """Print one output as it is generated."""
    body, began = ask.body(entry, 0), time.monotonic()
    if isinstance(entry.prompt, str):
        Console(highlight=False, soft_wrap=True).print(entry.prompt, style="dim", end="", markup=False)
    whole: dict[str, Any] = {"text": "", "token_ids": [], "finish_reason": None}
    last: dict[str, Any] = {}
    with closing(ask.remote.stream("/v1/completions", body | {"stream_options": {"include_usage": True}})) as stream:
        try:
            for chunk in stream:
                last |= {name: chunk[name] for name in ("usage", "metrics") if chunk.get(name)}
                for choice in chunk["choices"]:
                    whole["text"] += choice.get("text") or ""
                    whole["token_ids"] += choice.get("token_ids") or []
                    whole["finish_reason"] = choice.get("finish_reason") or whole["finish_reason"]
                    print(choice.get("text") or "", end="", flush=True)
        except KeyboardInterrupt:
            print(f"\ninterrupted after {len(whole['token_ids'])} tokens", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
        finally:
            print(flush=True)
    made.outputs.append(output_of(last, whole, str(wanted.index), time.monotonic() - began))


def _together(ask: Ask, prompts: Sequence[PromptEntry], wanted: Sequence[Wanted], made: TaskResults) -> None:
    """Ask for all outputs at once. One that fails does not stop the others."""
    pool = ThreadPoolExecutor(max_workers=min(AT_ONCE, len(wanted)))
    try:
        running: dict[Future[Output], Wanted] = {
            pool.submit(ask.output, prompts[each.prompt_index], each): each for each in wanted
        }
        with progress.shown(), progress.task("generating", len(wanted), "outputs") as bar:
            for done in as_completed(running):
                bar.advance()
                each = running[done]
                try:
                    made.end(each, done.result())
                except Exception as error:
                    made.failed[prompts[each.prompt_index].place] = error
    except KeyboardInterrupt:
        print(f"interrupted after {len(made.outputs)} of {len(wanted)} outputs", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def output_of(answer: Mapping[str, Any], choice: Mapping[str, Any], id: str, seconds: float) -> Output:
    """vLLM's answer as an output. The forward of the prompt, which emits the first token, counts as a step.

    Args:
        seconds: How long it took, seen from here; what vLLM says of itself goes first.
    """
    tokens = [int(token) for token in choice["token_ids"]]
    metrics = answer.get("metrics") or {}
    told = Acceptance.of_answer(metrics) or Acceptance()
    # Where nothing is found to draft, a step emits one token and is not among the drafts.
    steps = max(told.num_drafts + bool(tokens), len(tokens) - told.num_accepted_tokens)
    first, rest = metrics.get("time_to_first_token_ms"), metrics.get("generation_time_ms")
    spent = seconds if first is None or rest is None else (first + rest) / 1000
    scored = places(choice) if choice.get("logprobs") else None
    return Output(
        id=id,
        prompt_tokens=(answer.get("usage") or {}).get("prompt_tokens", 0),
        text=choice["text"],
        tokens=tokens,
        finish_reason=REASONS.get(str(choice["finish_reason"]), "error"),
        stop_reason=choice.get("stop_reason"),
        num_steps=steps,
        num_draft_tokens=told.num_draft_tokens,
        num_accepted_tokens=told.num_accepted_tokens,
        accepted_per_position=list(told.accepted_per_position),
        block_efficiency=len(tokens) / max(1, steps),
        seconds=spent,
        logprobs=None if scored is None else [each.own for each in scored],
        top_logprobs=None if scored is None else [dict(each.top) for each in scored],
    )


def _report(process: VllmProcess, before: Acceptance | None, made: TaskResults) -> None:
    """Print the measurements, and what vLLM's own counters say."""
    if made.task.as_json or not made.outputs:
        return
    print_measures(made.outputs)
    after = Acceptance.of_metrics(process.remote.text("/metrics"))
    if after is not None:
        found = after.since(before or Acceptance())
        print_line(
            f"vLLM counted {found.num_accepted_tokens} of {found.num_draft_tokens} draft tokens accepted in "
            f"{found.num_drafts} drafts, {found.acceptance_length:.2f} tokens per draft; by position "
            f"{', '.join(map(str, found.accepted_per_position)) or '-'}"
        )
