"""How many hands a request passes between its client and the engine."""

import asyncio
import sys
import threading
from functools import partial
from pathlib import Path
from types import FrameType

import httpx

from outrider import serve
from outrider.core.types import Request
from outrider.engine.output import Update
from outrider.serve.api.bodies import SamplingBody
from outrider.serve.api.request import ClientRequest
from outrider.serve.app import make_app
from outrider.serve.run.outputs import Delta, OutputTask, Ticket
from outrider.serve.run.service import Service
from tests.serve.served import NAME, loaded

ROOM = Path(serve.__file__).parent
FORMS = (SamplingBody, ClientRequest, OutputTask, Ticket, Request, Update, Delta)
MOST_FUNCTIONS, MOST_FILES = {False: 20, True: 21}, 8
ASKED = {
    "/v1/completions": {"prompt": "Once"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Once"}]},
}


def carries(value: object) -> bool:
    """Whether a value is a request, an update or an answer, from JSON to the engine's form, or a list of such."""
    if isinstance(value, list | tuple):
        return any(map(carries, value))
    if isinstance(value, dict):
        return not value.keys().isdisjoint(("prompt", "messages", "choices"))
    return isinstance(value, FORMS)


def test_a_request_passes_few_functions_of_few_files() -> None:
    """Counts the server's functions that hold the request, its updates or its answer, and give them to another function
    or return them: from the body's JSON to the engine, and from the engine to the answer's JSON.
    """
    engine = loaded(drafter="none")
    engine.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    service, noting = Service(engine, names=(NAME,)), False
    holders, givers = set[tuple[str, str]](), set[tuple[str, str]]()
    ways: dict[tuple[str, bool], set[tuple[str, str]]] = {}

    def note(frame: FrameType, event: str, returned: object) -> None:
        # A comprehension is a part of the function around it.
        if not noting or event not in ("call", "return") or frame.f_code.co_name.startswith("<"):
            return
        held = [value for name, value in frame.f_locals.items() if name not in ("self", "cls")]
        if any(map(carries, held)):
            holders.add((frame.f_code.co_filename, frame.f_code.co_qualname))
        if event == "call":
            # A message for another thread is a call with the request as its argument.
            given, giver = [each.args if isinstance(each, partial) else each for each in held], frame.f_back
        else:
            given, giver = [returned], frame
        if giver is not None and any(map(carries, given)):
            givers.add((giver.f_code.co_filename, giver.f_code.co_qualname))

    async def ask() -> None:
        nonlocal noting
        transport = httpx.ASGITransport(make_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=60) as client:
            for path, asked in ASKED.items():
                for stream in (False, True):
                    body = {**asked, "temperature": 0, "max_tokens": 4, "ignore_eos": True, "stream": stream}
                    noting = True
                    answer = await client.post(path, json=body)
                    noting = False
                    assert answer.status_code == 200, answer.text
                    passed = {each for each in holders & givers if Path(each[0]).is_relative_to(ROOM)}
                    ways[path, stream] = {(Path(file).name, name) for file, name in passed}
                    holders.clear()
                    givers.clear()

    threading.setprofile(note)
    service.start()
    sys.setprofile(note)
    try:
        asyncio.run(ask())
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        service.close()
    for (path, stream), way in ways.items():
        assert {"read", "Worker._begin", "Ticket.put", "OutputStream.take"} <= {name for _, name in way}
        assert len(way) <= MOST_FUNCTIONS[stream], (path, stream, len(way), sorted(way))
        assert len({file for file, _ in way}) <= MOST_FILES, (path, stream, sorted(way))
