"""The file of answers is whole for whoever reads it, while others are written."""

import asyncio
import json
import time

import httpx

from outrider.serve.observe.answers_log import ROUTE, AnswersLog, lessons_of, opened_log, pieces_of
from outrider.serve.settings import HttpSettings
from tests.serve.served import loaded, serving


def test_answers_are_kept_for_learning_unless_the_client_says_no(tmp_path):
    settings = HttpSettings(admin_key="admin", answers=tmp_path / "answers.jsonl")
    body = {"prompt": [3, 4, 5], "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    messages = [{"role": "user", "content": "Hello."}]
    with serving(loaded(), settings) as url, httpx.Client(base_url=url, timeout=60) as client:
        [choice] = client.post("/v1/completions", json=body).json()["choices"]
        for more in ({"stream": True}, {"store": False}):
            assert client.post("/v1/completions", json=body | more).status_code == 200
        asked = {"messages": messages, "max_tokens": 4, "temperature": 0}
        [said] = client.post("/v1/chat/completions", json=asked).json()["choices"]
        client.post("/v1/no/such", json=body)
        assert client.get(ROUTE).status_code == 401
        lines = client.get(ROUTE, headers={"authorization": "Bearer admin"}).text.splitlines()
    lessons = [lesson for line in lines for lesson in lessons_of(json.loads(line))]
    whole = {"tokens": [3, 4, 5, *choice["token_ids"]], "start": 3}
    spoken = [*messages, {"role": "assistant", "content": said["message"]["content"]}]
    assert lessons == [whole, whole, {"messages": spoken}]


def test_lines_that_come_while_a_file_is_sent_are_not_sent(tmp_path):
    file = tmp_path / "answers.jsonl"
    file.write_bytes(b"one\ntwo\n")
    pieces = pieces_of(file, 4)
    with file.open("ab") as more:
        more.write(b"three\n")
    assert b"".join(pieces) == b"one\n"


def test_who_has_an_answer_finds_it_in_the_file(monkeypatch, tmp_path):
    add = AnswersLog._add

    def slowly(log, line):
        time.sleep(0.2)
        add(log, line)

    async def app(scope, receive, send):
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"choices": [{"text": "said"}]}'})

    async def receive():
        return {"type": "http.request", "body": b'{"prompt": "asked"}', "more_body": False}

    async def run():
        log = AnswersLog(app, file=opened_log(tmp_path / "answers.jsonl"), admin_key="admin")
        had, read = asyncio.Event(), []

        async def answered(message):
            if message["type"] == "http.response.body":
                had.set()

        async def hear(message):
            read.append(message)

        scope = {"type": "http", "path": "/v1/completions", "method": "POST", "headers": []}
        asking = asyncio.create_task(log(scope, receive, answered))
        await had.wait()
        key = [(b"authorization", b"Bearer admin")]
        await log({**scope, "path": ROUTE, "method": "GET", "headers": key, "asgi": {}}, asyncio.Event().wait, hear)
        await asking
        return read

    monkeypatch.setattr(AnswersLog, "_add", slowly)
    head, *body = asyncio.run(run())
    text = b"".join(each["body"] for each in body)
    assert (b"content-length", str(len(text)).encode()) in head["headers"]
    assert json.loads(text)["body"] == {"prompt": "asked"}
