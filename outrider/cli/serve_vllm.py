"""outrider serve --engine vllm: the same server for clients, with vLLM behind it."""

import sys
from dataclasses import fields

from outrider.cli.learn import LearnOptions
from outrider.cli.serve import API_KEY, ServeOptions, check_extra, model_name, note_answers
from outrider.core.inputs import InputError
from outrider.serve.limits import Limits
from outrider.serve.vllm.options import EngineOptions
from outrider.setup import Setup

OURS_ALONE = {
    "other_drafter": "vLLM has one drafter",
    "response_template": "give vLLM's --reasoning-parser and --tool-call-parser with --engine-args",
    "priority": "give vLLM's --scheduling-policy priority with --engine-args",
    "per_request_metrics": "vLLM's answers always have their summary",
}
"""Options of our own engine's server, and what to do with vLLM."""


def serve_vllm(setup: Setup, options: ServeOptions, limits: Limits, learn: LearnOptions, engine: EngineOptions) -> int:
    """Serve until a signal comes, or vLLM ends. Returns the exit status."""
    check_extra()
    from outrider.serve.server import Endings, bound_socket, is_loopback, run, url_of
    from outrider.serve.settings import HttpSettings
    from outrider.serve.vllm.passing import PassingService, make_passing_app

    defaults = {field.name: field.default for field in fields(options)}
    for name, advice in OURS_ALONE.items():
        if getattr(options, name) != defaults[name]:
            raise InputError(f"--{name.replace('_', '-')} is not for --engine vllm: {advice}")
    if learn.learn:
        raise InputError(
            "--learn is not for --engine vllm; keep the answers with --log-answers, and train with `outrider learn`"
        )
    if not (is_loopback(options.host) or options.keys() or options.allow_no_key):
        raise InputError(
            f"other machines can reach {options.host}, and no key is set; give --api-key or {API_KEY}, or "
            "--allow-no-key to let everyone in"
        )
    flags: list[str] = []
    if options.chat_template is not None:
        flags += ["--chat-template", str(options.chat_template.absolute())]
    if options.trust_request_chat_template:
        flags.append("--trust-request-chat-template")
    settings = HttpSettings(
        keys=options.keys(),
        admin_key=options.admin_key,
        guard_all=options.guard_all,
        origins=options.cors_origin,
        answers=options.log_answers,
    )
    endings = Endings(
        drain_seconds=limits.drain_seconds,
        survives_death=options.keep_alive_on_death,
        header_bytes=limits.max_header_bytes,
    )
    with bound_socket(options.host, options.port) as bound:
        process = engine.process(
            setup,
            engine.vllm_python,
            names=options.served_model_name or (model_name(setup),),
            more_flags=tuple(flags),
            updates_weights=options.admin_key is not None,
        )
        with process:
            service = PassingService(process, limits)

            def ready() -> None:
                print(
                    f"serving {process.launch.names[0]} at {url_of(bound)} with vLLM {process.python.version}; "
                    "the API is below /v1",
                    file=sys.stderr,
                    flush=True,
                )
                note_answers(options)

            return run(make_passing_app(service, settings), service, bound, endings, ready)
