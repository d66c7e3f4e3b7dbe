"""How the HTTP layer behaves: names, keys and what requests may ask for."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class HttpSettings:
    """The options of the HTTP layer. Limits are those of the service.

    Attributes:
        keys: Keys of which a client must send one; empty lets everyone in.
        admin_key: Key of the routes under `/v1/admin`; None closes them.
        guard_all: Whether all routes want a key, and not those under `/v1` alone.
        priorities: Whether requests may have a priority other than 0.
        request_metrics: What answers say about their own speed: `none`, `summary`, or `detailed` with every step.
        request_chat_templates: Whether requests may bring a chat template, which is a program.
        response_template: How reasoning and tool calls are found in outputs: transformers' response template, `auto`
            for the tokenizer's own or a known one, None for plain text.
        lossy: Whether the server's verifier need not keep the target's law, which `/server_info` says.
        keep_alive_seconds: A stream without bytes for so long gets a comment.
        origins: Origins of pages in browsers that may use the server; `*` is all.
        log_text: Whether the log of requests holds prompts and outputs.
        target: What the server calls the model's files in `/v1/models`.
        answers: The file where requests and answers are kept; None keeps none.
    """

    keys: tuple[str, ...] = ()
    admin_key: str | None = None
    guard_all: bool = False
    priorities: bool = False
    request_metrics: Literal["none", "summary", "detailed"] = "summary"
    request_chat_templates: bool = False
    response_template: Mapping[str, Any] | Literal["auto"] | None = "auto"
    lossy: bool = False
    keep_alive_seconds: float = 15.0
    origins: tuple[str, ...] = ()
    log_text: bool = False
    target: str | None = None
    answers: Path | None = None
