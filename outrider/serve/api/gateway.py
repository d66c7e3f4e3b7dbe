"""What all routes share: the service, the settings, and how outputs are read."""

import hashlib
import json
import logging
import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version

from starlette.requests import Request

from outrider import catalog
from outrider.decoding.protocol import Parts
from outrider.serve.api.tokens import Vocabulary
from outrider.serve.errors import ServeError
from outrider.serve.observe.answers_log import AnswersLog
from outrider.serve.observe.traces import Traces
from outrider.serve.run.parser import OutputParser
from outrider.serve.run.service import Service
from outrider.serve.settings import HttpSettings

MOST_UNKNOWN = 1000
"""Most unknown fields of requests that are logged."""
NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""What a client may call its request."""
log = logging.getLogger("outrider.serve")


@dataclass(frozen=True, kw_only=True)
class Gateway:
    """Between HTTP and the service.

    Attributes:
        parser: How reasoning and tool calls are found in outputs.
        answers: Where requests and answers are kept; None keeps none.
        running: Names of the requests that run.
        unknown: Fields of requests so far that nobody knows.
        traces: Where spans of requests go; None makes none.
    """

    service: Service
    settings: HttpSettings
    vocabulary: Vocabulary
    parser: OutputParser
    answers: AnswersLog | None = None
    running: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)
    traces: Traces | None = None
    _fingerprints: dict[int, tuple[Parts, str]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, service: Service, settings: HttpSettings, traces: Traces | None = None) -> "Gateway":
        """The gateway of a service. Raises InputError for a response template or a file of answers it cannot use."""
        return cls(
            service=service,
            settings=settings,
            vocabulary=Vocabulary(service.tokenizer, service.engine.parts.target.vocab_size),
            parser=OutputParser.of(service.tokenizer, settings.response_template),
            answers=None if settings.answers is None else AnswersLog.opened(settings.answers),
            traces=traces,
        )

    @property
    def name(self) -> str:
        """The model's name in answers."""
        return self.service.names[0]

    @cached_property
    def version(self) -> str:
        """The version of Outrider."""
        return version("outrider")

    @property
    def fingerprint(self) -> str:
        """A name for what decides about outputs: the version, the target's shape and the parts."""
        parts, target = self.service.engine.parts, self.service.engine.parts.target
        if (known := self._fingerprints.get(id(parts))) is not None and known[0] is parts:
            return known[1]
        facts = [self.version, self.name, target.vocab_size, target.max_context, str(target.device)]
        facts += [catalog.name_of(part) for part in (parts.drafter, parts.verifier, parts.tree, parts.length)]
        fingerprint = "fp_" + hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]
        # That of the newest parts: to ask for all names takes as long as an event.
        self._fingerprints.clear()
        self._fingerprints[id(parts)] = parts, fingerprint
        return fingerprint

    def check_model(self, name: str | None) -> None:
        """Raise ServeError for a model that is not served."""
        if name is not None and name not in self.service.names:
            raise ServeError(
                404,
                f"there is no model {name[:200]!r} here; this server has {', '.join(self.service.names)}",
                param="model",
                code="model_not_found",
            )

    def note_unknown(self, names: Iterable[str]) -> None:
        """Log fields that nobody knows, each once."""
        for name in names:
            if name not in self.unknown and len(self.unknown) < MOST_UNKNOWN:
                self.unknown.add(name)
                log.debug("a request has the unknown field %.100r", name)

    def unique(self, id: str) -> str:
        """The name, or a similar one that no running request has."""
        return f"{id}-{request_id(None)[:8]}" if id in self.running else id


def gateway_of(request: Request) -> Gateway:
    """The gateway of the app that answers a request."""
    gateway: Gateway = request.app.state.gateway
    return gateway


def request_id(name: str | None) -> str:
    """The client's name of a request, or a new one.

    Example:
        >>> request_id("load-7"), len(request_id("no\\nname"))
        ('load-7', 32)
    """
    return name if name is not None and NAME.fullmatch(name) else uuid.uuid4().hex
