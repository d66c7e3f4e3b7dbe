"""How many hands a request passes between its client and the engine."""

import asyncio
import sys
import threading
from functools import partial
from pathlib import Path
from types import FrameType

import httpx
import pytest

from outrider.core.types import Request
from outrider.engine.output import Update
from outrider.serve.api import bodies
from outrider.serve.api.request import ClientRequest
from outrider.serve.app import make_app
from outrider.serve.run.outputs import Delta
from outrider.serve.run.service import Service
from outrider.serve.run.task import OutputTask, Ticket
from tests.serve.served import NAME, loaded

ROOM = str(Path(bodies.__file__).parents[1])
FORMS = (bodies.Body, ClientRequest, OutputTask, Ticket, Request, Update, Delta)
MOST_FUNCTIONS, MOST_FILES = 20, 8
ASKED = {
    "/v1/completions": {"prompt": "Once"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Once"}]},
}


def carries(value: object) -> bool:
    """Whether a value is a request or a part of its answer, in any form between JSON and the engine's, or holds one."""
    if isinstance(value, list | tuple):
        return any(carries(each) for each in value)
    if isinstance(value, dict):
        return not value.keys().isdisjoint(("prompt", "messages", "choices"))
    return isinstance(value, FORMS) or (isinstance(value, partial) and carries(value.args))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKED)
def test_a_request_passes_at_most_twenty_functions_of_eight_files(path: str, stream: bool) -> None:
    """Counts the server's functions that hold the request, or its answer, and give it to another function or return it:
    from the body's JSON to the engine, and from the engine's updates to the answer's JSON.
    """
    engine = loaded(drafter="none")
    engine.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    service = Service(engine, names=(NAME,))
    body = {**ASKED[path], "temperature": 0, "max_tokens": 4, "ignore_eos": True, "stream": stream}
    holders, givers, noting = set[tuple[str, str]](), set[tuple[str, str]](), False

    def note(frame: FrameType, event: str, argument: object) -> None:
        if noting and event in ("call", "return"):
            code = frame.f_code
            values = [value for name, value in frame.f_locals.items() if name not in ("self", "cls")]
            name, giver = (code.co_filename, code.co_qualname), frame if event == "return" else frame.f_back
            if code.co_filename.startswith(ROOM) and any(map(carries, values)):
                holders.add(name)
            if giver is not None and (carries(argument) if event == "return" else any(map(carries, values))):
                givers.add((giver.f_code.co_filename, giver.f_code.co_qualname))

    async def run() -> None:
        nonlocal noting
        transport = httpx.ASGITransport(make_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=60) as client:
            noting = True
            answer = await client.post(path, json=body)
            noting = False
            assert answer.status_code == 200, answer.text

    threading.setprofile(note)
    service.start()
    sys.setprofile(note)
    try:
        asyncio.run(run())
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        service.close()
    way = sorted((Path(file).name, name) for file, name in holders & givers if "<" not in name.rpartition(".")[2])
    assert {"read", "Worker._begin", "OutputStream.take"} <= {name for _, name in way}
    assert len(way) <= MOST_FUNCTIONS, (len(way), way)
    assert len({file for file, _ in way}) <= MOST_FILES, way
