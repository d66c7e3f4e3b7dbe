"""A server with OpenAI's API as the backend of a command."""

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

from outrider.cli.request import RequestOptions
from outrider.core.inputs import InputError
from outrider.core.types import Sampling
from outrider.engine.engine import Sink
from outrider.engine.output import FinishReason, Output, Update
from outrider.engine.prompts import BESIDE_MESSAGES, Prompt
from outrider.serve.client.answers import AnswerToken, places
from outrider.serve.client.remote import Remote, RemoteError, understood
from outrider.serve.vllm.counters import Acceptance

LOOK = 0.002
"""Seconds of a wait for what is new, so that requests that are due are sent in time."""
AT_ONCE = 1024
"""Most requests that the server has at once; others wait here."""
LARGEST_SEED = 2**63 - 1
"""Servers have a bit less of a seed than an engine."""
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
REASONS: Mapping[str, FinishReason] = {"stop": "stop", "tool_calls": "stop", "length": "length", "abort": "cancelled"}


class UrlBackend:
    """A server, each request in a thread of its own.

    Args:
        model: The name of its model.
        check: Raises InputError for fields of a request that the server would drop or get wrong.
        reasoning: Called with what an answer tells of its reasoning, as it comes.
    """

    engine = None

    def __init__(
        self,
        remote: Remote,
        model: str,
        *,
        check: Callable[[Mapping[str, Any]], None] = lambda fields: None,
        reasoning: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._remote, self._model, self._check, self._reasoning = remote, model, check, reasoning
        self._running: dict[str, _Answer] = {}
        self._waiting: deque[_Answer] = deque()
        self._updates: queue.SimpleQueue[Update] = queue.SimpleQueue()
        self._num_threads = 0

    @property
    def sampling(self) -> Sampling:
        """Neutral settings: those of the server are not known, and what is not given is left to it."""
        return Sampling()

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._running)

    @property
    def num_unread_tokens(self) -> int:
        """0: a server does not tell."""
        return 0

    def add(
        self, prompt: Prompt, request: RequestOptions, *, id: str, sample: int = 0, logprobs: int | None = None
    ) -> None:
        """Send a request. Chat messages go through the server's own template."""
        body: dict[str, Any] = {
            "model": self._model,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        fields, beside = request.body(), prompt_fields(prompt)
        if both := sorted(fields.keys() & beside.keys()):
            raise InputError(f"{both[0]} is given with the messages and as an option; give it once")
        body |= fields | beside
        self._check(body)
        is_chat = "messages" in body
        if not is_chat and "tools" in body:
            raise InputError("tools can be given with chat messages alone; leave out --tools")
        if body.get("seed") is not None:
            body["seed"] = (int(body["seed"]) + sample) & LARGEST_SEED
        if logprobs is not None:
            body["return_tokens_as_token_ids"] = True
            body |= {"logprobs": True, "top_logprobs": logprobs} if is_chat else {"logprobs": logprobs}
        answer = _Answer(id=id, path=CHAT if is_chat else COMPLETIONS, body=body, reasoning=self._reasoning)
        self._running[id] = answer
        self._waiting.append(answer)
        self._send()

    def step(self, sink: Sink | None = None) -> list[Update]:
        """What has come, after a short wait for the first of it."""
        updates: list[Update] = []
        with suppress(queue.Empty):
            for wait in itertools.chain([LOOK], itertools.repeat(0.0)):
                update = self._updates.get(timeout=wait) if wait else self._updates.get_nowait()
                ends = update.output is not None
                if ends:
                    self._num_threads -= 1
                    self._send()
                if update.id in self._running:
                    updates.append(update)
                    if ends:
                        del self._running[update.id]
        return updates

    def cancel(self, id: str) -> Output | None:
        """Close the connection of a request. Returns its output so far, or None if there is no such request."""
        answer = self._running.pop(id, None)
        return None if answer is None else answer.output("cancelled")

    def _send(self) -> None:
        """Send requests that wait, as many as the server may have."""
        while self._waiting and self._num_threads < AT_ONCE:
            self._num_threads += 1
            threading.Thread(target=self._read, args=(self._waiting.popleft(),), daemon=True).start()

    def _read(self, answer: "_Answer") -> None:
        """Pass on what comes of a request, in its thread."""
        try:
            with understood(f"{self._remote.url}{answer.path}"):
                if answer.id in self._running:
                    with closing(self._remote.stream(answer.path, answer.body)) as chunks:
                        for chunk in chunks:
                            if answer.id not in self._running:
                                break
                            for update in answer.read(chunk):
                                self._updates.put(update)
                output = answer.output()
        except Exception as error:
            # These may be what is wrong.
            answer.stats.clear()
            output = answer.output("error", error)
        self._updates.put(Update(id=answer.id, tokens=[], text="", output=output))


@dataclass(kw_only=True)
class _Answer:
    """A request, and what has come of its answer; changes in place.

    Attributes:
        stats: The newest `usage` and `metrics` of its chunks.
        scored: The tokens with their log-probabilities, if asked for.
    """

    id: str
    path: str
    body: Mapping[str, Any]
    reasoning: Callable[[str], None]
    began: float = field(default_factory=time.monotonic)
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    scored: list[AnswerToken] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    stats: dict[str, Any] = field(default_factory=dict)

    def read(self, chunk: Mapping[str, Any]) -> list[Update]:
        """What a chunk adds."""
        self.stats |= {name: chunk[name] for name in ("usage", "metrics") if chunk.get(name)}
        updates = []
        for choice in chunk["choices"]:
            text, tokens = choice.get("text") or "", list(choice.get("token_ids") or ())
            if self.path == CHAT:
                delta = choice["delta"]
                text = (delta.get("content") or "") + calls_of(delta)
                if thought := delta.get("reasoning") or delta.get("reasoning_content"):
                    self.reasoning(thought)
            if choice.get("logprobs"):
                self.scored += places(choice)
            self.text += text
            self.tokens += tokens
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            self.stop_reason = choice.get("stop_reason") or self.stop_reason
            if text or tokens:
                updates.append(Update(id=self.id, tokens=tokens, text=text))
        return updates

    def output(self, reason: FinishReason | None = None, error: Exception | None = None) -> Output:
        """The output so far. Steps and drafts are 0 where the server does not tell them.

        Args:
            reason: Why it ended; None is what the server says.
        """
        usage, metrics = self.stats.get("usage") or {}, self.stats.get("metrics") or {}
        if reason is None and self.path == COMPLETIONS and usage.get("completion_tokens") and not self.tokens:
            raise RemoteError("the server tells no ids of tokens, which are needed here (return_token_ids)")
        drafts = Acceptance.of_answer(metrics) or Acceptance()
        steps = (metrics.get("outrider") or {}).get("steps", 0)
        if metrics and not steps:
            # The prompt's forward emits the first token. Steps that find nothing to draft are not among the drafts.
            steps = max(drafts.num_drafts + bool(self.tokens), len(self.tokens) - drafts.num_accepted_tokens)
        first, rest = metrics.get("time_to_first_token_ms"), metrics.get("generation_time_ms")
        seconds = time.monotonic() - self.began if first is None or rest is None else (first + rest) / 1000
        scored = self.scored or None
        return Output(
            id=self.id,
            prompt_tokens=usage.get("prompt_tokens", 0),
            text=self.text,
            tokens=list(self.tokens),
            finish_reason=reason or REASONS.get(str(self.finish_reason), "error"),
            stop_reason=self.stop_reason,
            num_steps=steps,
            num_draft_tokens=drafts.num_draft_tokens,
            num_accepted_tokens=drafts.num_accepted_tokens,
            accepted_per_position=list(drafts.accepted_per_position),
            block_efficiency=len(self.tokens) / steps if steps else 0.0,
            seconds=seconds,
            logprobs=None if scored is None else [each.logprob for each in scored],
            top_logprobs=None if scored is None else [dict(each.top) for each in scored],
            error=error,
        )


def prompt_fields(prompt: Prompt) -> dict[str, Any]:
    """A prompt as fields of a request.

    Example:
        >>> prompt_fields([{"role": "user", "content": "Hello."}])
        {'messages': [{'role': 'user', 'content': 'Hello.'}]}
        >>> prompt_fields("Once"), prompt_fields((3, 4))
        ({'prompt': 'Once'}, {'prompt': [3, 4]})
    """
    if isinstance(prompt, str):
        return {"prompt": prompt}
    fields: dict[str, Any] = {}
    if isinstance(prompt, Mapping):
        fields = {name: prompt[name] for name in BESIDE_MESSAGES if prompt.get(name) is not None}
        prompt = prompt["messages"] if "messages" in prompt else prompt["input_ids"]
    listed: list[Any] = list(prompt)
    if not listed or not isinstance(listed[0], Mapping):
        return {"prompt": [int(token) for token in listed]}
    if listed[-1].get("role") == "assistant":
        fields |= {"add_generation_prompt": False, "continue_final_message": True}
    return {"messages": listed} | fields


def calls_of(delta: Mapping[str, Any]) -> str:
    r"""The piece of a tool's call that a chunk holds, as text: the tool's name, then its arguments.

    Example:
        >>> calls_of({"tool_calls": [{"function": {"name": "time", "arguments": "{}"}}]})
        '\ntime {}'
    """
    calls = [call.get("function") or {} for call in delta.get("tool_calls") or ()]
    return "".join((f"\n{call['name']} " if call.get("name") else "") + (call.get("arguments") or "") for call in calls)
