"""outrider chat --url: a conversation with a server."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from outrider.cli.chat import converse, note_answer
from outrider.cli.remote import RemoteOptions
from outrider.cli.request import RequestOptions
from outrider.cli.request_body import body_of
from outrider.core.types import Sampling
from outrider.serve.client.remote import Remote, understood
from outrider.setup import Setup


def talk_remotely(setup: Setup, request: RequestOptions, options: RemoteOptions, system: str | None) -> None:
    """Let a server answer each line of standard input."""
    remote = options.remote(setup)
    speaker = RemoteSpeaker(remote, str(options.chosen(remote)["id"]))
    request.sampling(speaker.sampling)
    request.form()
    request.tool_schemas()
    converse(speaker, request, system)


class RemoteSpeaker:
    """A server that answers chats."""

    def __init__(self, remote: Remote, model: str) -> None:
        self._remote, self._model = remote, model

    @property
    def sampling(self) -> Sampling:
        """Neutral settings: those of the server are not known, and what is not given is left to it."""
        return Sampling()

    def answer(self, messages: list[dict[str, str]], request: RequestOptions, show: Callable[[str], None]) -> str:
        """The answer to a conversation."""
        body = {"model": self._model, "messages": messages, "stream_options": {"include_usage": True}}
        text, last = "", dict[str, Any]()
        stream = self._remote.stream("/v1/chat/completions", body | body_of(request))
        try:
            with understood(f"{self._remote.url}/v1/chat/completions"):
                for chunk in stream:
                    last = dict(chunk) if chunk.get("usage") else last
                    for choice in chunk["choices"]:
                        delta = choice["delta"]
                        if (thought := delta.get("reasoning") or "") and sys.stderr is not None:
                            print(thought, end="", file=sys.stderr, flush=True)
                        if piece := (delta.get("content") or "") + _calls(delta):
                            text += piece
                            show(piece)
        except KeyboardInterrupt:
            # Closing the connection cancels the answer.
            pass
        finally:
            stream.close()
        print()
        _note(last)
        return text


def _calls(delta: Mapping[str, Any]) -> str:
    r"""The piece of a tool's call that a chunk holds, as text: the tool's name, then its arguments.

    Example:
        >>> _calls({"tool_calls": [{"function": {"name": "time", "arguments": "{}"}}]})
        '\ntime {}'
    """
    calls = [call.get("function") or {} for call in delta.get("tool_calls") or ()]
    return "".join((f"\n{call['name']} " if call.get("name") else "") + (call.get("arguments") or "") for call in calls)


def _note(chunk: Mapping[str, Any]) -> None:
    """Print the numbers of an answer, if the server told them."""
    own = (chunk.get("metrics") or {}).get("outrider")
    if own:
        tokens = chunk["usage"]["completion_tokens"]
        note_answer(tokens, own["steps"], own["block_efficiency"])
