"""The file of answers is whole for whoever reads it, while others are written."""

import asyncio
import json
import time

from outrider.serve.answers_log import ROUTE, AnswersLog, opened_log, pieces_of


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
