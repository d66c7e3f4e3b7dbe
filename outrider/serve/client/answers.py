"""Answers of a server with their log-probabilities, tokens by id."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.serve.client.remote import Remote, RemoteError, understood

PREFIX = "token_id:"
"""How a server writes a token as its id."""
RAW = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": True}
"""Settings with which tokens are drawn from the raw distribution, whatever the model's own settings are."""


@dataclass(frozen=True, kw_only=True)
class AnswerToken:
    """One token of a text.

    Attributes:
        token: Its id.
        logprob: Its log-probability.
        top: Those of the likeliest tokens, its logprob too.
    """

    token: int
    logprob: float
    top: Mapping[int, float]

    @property
    def gap(self) -> float:
        """How much less likely it is than the likeliest token."""
        return max(self.top.values()) - self.logprob


def complete(remote: Remote, prompt: str | Sequence[int], **fields: Any) -> list[list[AnswerToken]]:
    """The tokens of each output after a prompt."""
    answer = remote.post("/v1/completions", _body(prompt) | fields)
    with understood(f"{remote.url}/v1/completions"):
        return [places(choice) for choice in sorted(answer["choices"], key=lambda each: each["index"])]


def score(remote: Remote, tokens: Sequence[int], top: int) -> list[AnswerToken]:
    """The tokens of a text behind its first one, as the server scores them where it generates nothing."""
    body = _body(tokens) | {"echo": True, "max_tokens": 0, "logprobs": top, "temperature": 0}
    with understood(f"{remote.url}/v1/completions"):
        return places(remote.post("/v1/completions", body)["choices"][0], first=1)


def tokenize(remote: Remote, body: Mapping[str, Any]) -> list[int]:
    """The token ids of a text or of a conversation, as the server makes them."""
    with understood(f"{remote.url}/tokenize"):
        return [int(token) for token in remote.post("/tokenize", body)["tokens"]]


def places(choice: Mapping[str, Any], first: int = 0) -> list[AnswerToken]:
    """The tokens of a choice, of a completion or of a chat.

    Args:
        first: Where to begin.
    """
    logprobs = choice.get("logprobs")
    if not logprobs:
        raise RemoteError("the server tells no log-probabilities; they are needed here (logprobs)")
    if "content" in logprobs:
        return [
            AnswerToken(
                token=_id(each["token"]),
                logprob=each["logprob"],
                top={_id(other["token"]): other["logprob"] for other in each["top_logprobs"]},
            )
            for each in (logprobs["content"] or [])[first:]
        ]
    rows = zip(
        logprobs["tokens"][first:], logprobs["token_logprobs"][first:], logprobs["top_logprobs"][first:], strict=True
    )
    return [
        AnswerToken(token=_id(token), logprob=logprob, top={_id(name): value for name, value in top.items()})
        for token, logprob, top in rows
    ]


def _body(prompt: str | Sequence[int]) -> dict[str, Any]:
    text_or_ids = prompt if isinstance(prompt, str) else list(prompt)
    return {"prompt": text_or_ids, "return_tokens_as_token_ids": True, **RAW}


def _id(name: str) -> int:
    if not name.startswith(PREFIX):
        raise RemoteError(
            "the server does not name tokens by their ids; they are needed here (return_tokens_as_token_ids)"
        )
    return int(name.removeprefix(PREFIX))
