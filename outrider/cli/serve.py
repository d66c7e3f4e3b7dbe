"""outrider serve: an engine behind an API like OpenAI's, or vLLM's own server. Imports nothing heavy."""

import ipaddress
import json
import os
import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.cli.learn import LearnOptions
from outrider.cli.supported import ENGINE, VLLM
from outrider.core import progress
from outrider.core.inputs import InputError, needs, parse_json, shown, text_of, unknown
from outrider.serve.limits import Limits
from outrider.serve.vllm.options import EngineOptions
from outrider.setup import Setup

if TYPE_CHECKING:
    from outrider.drafters.protocol import Drafter
    from outrider.engine.engine import Engine
    from outrider.serve.run.learner import OnlineLearner
    from outrider.serve.run.renewal import Renewal
    from outrider.serve.settings import HttpSettings
else:
    Drafter = Engine = OnlineLearner = Renewal = HttpSettings = object

API_KEY = "OUTRIDER_API_KEY"
"""The variable of the environment that may hold a key."""
METRICS = ("none", "summary", "detailed")
LIBRARIES = ("fastapi", "uvicorn", "prometheus_client")
"""What the extra `serve` installs."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Where a server listens, whom it lets in, and what it tells.

    Attributes:
        host: The address to listen at; 0.0.0.0 is all of this machine.
        port: The port; 0 takes a free one.
        api_key: A key that lets clients in; may be given several times. One may be in OUTRIDER_API_KEY.
        allow_no_key: Listen at addresses that other machines reach without any key.
        admin_key: The key of the routes below /v1/admin, which change the drafter; they are closed without one.
        guard_all: Ask for a key on every route, not below /v1 alone.
        served_model_name: The model's name for clients; may be given several times. By default the target's.
        other_drafter: Another drafter, as in --drafter, that requests may name by its first word; several times.
        chat_template: File of a chat template to use instead of the tokenizer's own.
        response_template: How reasoning and tool calls are found in outputs: a JSON file, `auto` or `none`.
        trust_request_chat_template: Let requests bring chat templates, which are programs.
        priority: Let requests set their priority; lower goes first.
        per_request_metrics: What answers tell of their own speed: none, summary or detailed.
        cors_origin: An origin whose pages may use the server, or *; may be given several times.
        log_json: Log one line of JSON for each request to standard error, without prompts and outputs.
        log_text: Let these lines hold prompts and outputs.
        otlp_traces_endpoint: Send a span of each request to this URL, by OTLP over HTTP, without prompts and outputs.
        otel_content: Let these spans hold prompts and outputs, as events.
        keep_alive_on_death: Answer on after the engine has died, instead of ending with status 1.
        log_answers: Keep requests and answers in this file of JSON lines, for `outrider learn`; a request with
            `"store": false` is not kept. The admin key lets clients read it at /v1/admin/answers.
        weight_updates: Let vLLM take new weights of its drafter from this machine, for `outrider learn`. Its routes for
            them ask for no key.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: tuple[str, ...] = ()
    allow_no_key: bool = False
    admin_key: str | None = None
    guard_all: bool = False
    served_model_name: tuple[str, ...] = ()
    other_drafter: tuple[str, ...] = ()
    chat_template: Path | None = None
    response_template: str = "auto"
    trust_request_chat_template: bool = False
    priority: bool = False
    per_request_metrics: str = "summary"
    cors_origin: tuple[str, ...] = ()
    log_json: bool = False
    log_text: bool = False
    otlp_traces_endpoint: str | None = None
    otel_content: bool = False
    keep_alive_on_death: bool = False
    log_answers: Path | None = None
    weight_updates: bool = False

    def __post_init__(self) -> None:
        if self.per_request_metrics not in METRICS:
            raise unknown("per_request_metrics", self.per_request_metrics, METRICS)
        if not all(self.api_key):
            raise InputError("api_key must not be empty")
        if self.log_text and not self.log_json:
            raise InputError("--log-text says what lines of the log hold; give --log-json too")
        if self.otel_content and self.otlp_traces_endpoint is None:
            raise InputError("--otel-content says what spans hold; give --otlp-traces-endpoint too")

    def keys(self) -> tuple[str, ...]:
        """All keys that let clients in."""
        key = os.environ.get(API_KEY)
        return (*self.api_key, *((key,) if key else ()))

    def check_reach(self) -> None:
        """Raise InputError where other machines could change or use the server without a key."""
        if is_loopback(self.host):
            return
        if self.weight_updates:
            raise InputError(
                f"--weight-updates opens routes that ask for no key, and other machines can reach {self.host}; give a "
                "--host of this machine alone, such as 127.0.0.1"
            )
        if not (self.keys() or self.allow_no_key):
            raise InputError(
                f"other machines can reach {self.host}, and no key is set; give --api-key or {API_KEY}, or "
                "--allow-no-key to let everyone in"
            )

    def settings(self, setup: Setup) -> "HttpSettings":
        """The options of the HTTP layer."""
        from outrider.serve.settings import HttpSettings

        return HttpSettings(
            keys=self.keys(),
            admin_key=self.admin_key,
            guard_all=self.guard_all,
            priorities=self.priority,
            request_metrics=self.per_request_metrics,  # type: ignore[arg-type]
            request_chat_templates=self.trust_request_chat_template,
            response_template=self._response_template(),
            lossy=setup.allow_lossy,
            origins=self.cors_origin,
            log_text=self.log_text,
            target=None if setup.target is None else Path(str(setup.target)).name,
            answers=self.log_answers,
        )

    def _response_template(self) -> Any:
        """How reasoning and tool calls are found in outputs."""
        if self.response_template in ("auto", "none"):
            return "auto" if self.response_template == "auto" else None
        text = text_of(Path(self.response_template), "response template", "a JSON file, auto or none")
        template = parse_json(text, self.response_template)
        if not isinstance(template, dict):
            raise InputError(f"{self.response_template} must hold a JSON object, got {shown(template)}")
        return template


def serve(setup: Setup, options: ServeOptions, limits: Limits, learn: LearnOptions) -> int:
    """Serve until a signal comes. Returns the exit status."""
    ENGINE.check(options)
    options.check_reach()
    check_extra()
    with progress.importing():
        from outrider.cli.opened import opened
        from outrider.serve.app import make_app
        from outrider.serve.observe.logs import use_json
        from outrider.serve.observe.traces import Traces
        from outrider.serve.run.service import Service
        from outrider.serve.server import bound_socket, run, url_of

    learn.check(setup)
    settings = options.settings(setup)
    endpoint = options.otlp_traces_endpoint
    traces = None if endpoint is None else Traces.to(endpoint, content=options.otel_content)
    if options.log_json:
        use_json()
    with bound_socket(options.host, options.port) as bound:
        engine = opened(setup)
        if options.chat_template is not None:
            use_chat_template(engine, options.chat_template)
        learner = learner_of(learn, engine)
        names = options.served_model_name or (model_name(setup),)
        drafter = drafter_name(setup, engine)
        others = drafters_of(setup, options, engine)
        renewal = renewal_of(setup, options, engine, drafter)
        service = Service(
            engine,
            names=names,
            limits=limits,
            drafter=drafter,
            drafters=others,
            renewal=renewal,
            learns=learner is not None,
        )

        def ready() -> None:
            print(
                f"serving {service.names[0]} at {url_of(bound)} ({engine.max_slots} requests at once, "
                f"{service.max_context} tokens each); the API is below /v1",
                file=sys.stderr,
                flush=True,
            )
            if options.log_answers is not None:
                print(f"requests and answers are kept in {options.log_answers}", file=sys.stderr, flush=True)
            if setup.forward is None:
                note_forwards(engine)

        try:
            app = make_app(service, settings, traces)
            return run(app, service, bound, ready, survives_death=options.keep_alive_on_death)
        finally:
            if traces is not None:
                traces.close()
            if learner is not None:
                learner.finish()


def serve_vllm(setup: Setup, options: ServeOptions, limits: Limits, learn: LearnOptions, engine: EngineOptions) -> int:
    """Run vLLM's own server until a signal comes, or it ends. Returns the exit status."""
    VLLM.check(setup, options, limits, learn)
    options.check_reach()
    from outrider.serve.vllm.launch import check_clients

    flags: list[str] = []
    if options.chat_template is not None:
        flags += ["--chat-template", str(options.chat_template.absolute())]
    if options.trust_request_chat_template:
        flags.append("--trust-request-chat-template")
    if options.cors_origin:
        flags += ["--allowed-origins", json.dumps(options.cors_origin)]
    process = engine.process(
        setup,
        engine.vllm_python,
        keys=options.keys(),
        shows_log=True,
        names=options.served_model_name or (model_name(setup),),
        host=options.host,
        port=options.port,
        more_flags=tuple(flags),
        updates_weights=options.weight_updates,
    )
    try:
        check_clients(process.launch, process.python, lossy=setup.allow_lossy)
        with process:
            name, version = process.launch.names[0], process.python.version
            process.tell(f"serving {name} at {process.remote.url} with vLLM {version}; the API is below /v1")
            return process.wait()
    finally:
        process.stop()


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address.

    Example:
        >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
        (True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def note_forwards(engine: Engine) -> None:
    """Say that forwards could be compiled, if they could."""
    from outrider.cli.forwards import could_be_compiled

    if could_be_compiled(engine):
        note = "forwards are not compiled; `outrider prepare` with the same models compiles them for this machine, once"
        print(note, file=sys.stderr, flush=True)


def check_extra() -> None:
    """Raise InputError if a library of the extra is not installed."""
    for library in LIBRARIES:
        if find_spec(library) is None:
            raise needs("outrider serve", library, "serve")


def model_name(setup: Setup) -> str:
    """The model's name for clients: that of the target's directory or GGUF file, or its hub id."""
    target = setup.target
    if target is None:
        return "outrider"
    path = Path(str(target))
    if path.is_file():
        return path.resolve().stem
    return path.resolve().name if path.is_dir() else str(target)


def drafter_name(setup: Setup, engine: Engine) -> str:
    """What clients call the engine's own drafter: its first word, or for a checkpoint alone what it was found to be."""
    from outrider.assembly import completed
    from outrider.catalog import name_of, rows

    name = str(completed(setup).drafter).partition(":")[0]
    return name if name in rows("drafter") else name_of(engine.parts.drafter)


def drafters_of(setup: Setup, options: ServeOptions, engine: Engine) -> dict[str, Drafter]:
    """The drafters that requests may name, beside the engine's own. They share its target."""
    from outrider.assembly import assemble

    drafters: dict[str, Drafter] = {}
    for spec in options.other_drafter:
        other = assemble(replace(setup, drafter=spec), target=engine.parts.target)
        drafters[spec.partition(":")[0]] = other.parts.drafter
    return drafters


def renewal_of(setup: Setup, options: ServeOptions, engine: Engine, drafter: str) -> "Renewal":
    """What loads the server's drafters anew with weights that clients send.

    Args:
        own: The name of the engine's own drafter.
    """
    from outrider.assembly import assemble, completed
    from outrider.serve.run.renewal import Renewal

    specs = {drafter: str(completed(setup).drafter)} | {spec.partition(":")[0]: spec for spec in options.other_drafter}

    def load(spec: str) -> Drafter:
        return assemble(replace(setup, drafter=spec, probe=False), target=engine.parts.target).parts.drafter

    return Renewal(specs=specs, load=load)


def learner_of(learn: LearnOptions, engine: Engine) -> "OnlineLearner | None":
    """Lets the engine's draft model learn from requests; None if it shall not."""
    learning = learn.begin(engine, serves=True)
    if learning is None:
        return None
    from outrider.serve.run.learner import OnlineLearner

    return OnlineLearner(engine, learning)


def use_chat_template(engine: Engine, file: Path) -> None:
    """Give the tokenizer a chat template from a file."""
    if engine.tokenizer is None:
        raise InputError("there is no tokenizer beside the target, and a chat template needs one; name --tokenizer")
    engine.tokenizer.chat_template = text_of(file, "chat template", "a Jinja file")
