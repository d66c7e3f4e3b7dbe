"""The file of answers is whole for whoever reads it, while others are written."""

import json
import time

import httpx
import pytest

from outrider.serve.observe.answers_log import ROUTE, AnswersLog, lessons_of
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
    log = AnswersLog.opened(tmp_path / "answers.jsonl")
    log.file.write_bytes(b"one\ntwo\n")
    pieces = log.pieces(4)
    with log.file.open("ab") as more:
        more.write(b"three\n")
    assert b"".join(pieces) == b"one\n"


@pytest.mark.parametrize("streams", [False, True])
def test_who_has_an_answer_finds_it_in_the_file_and_streams_that_broke_off_are_not_kept(monkeypatch, tmp_path, streams):
    write = AnswersLog._write

    def slowly(log, line):
        time.sleep(0.2)
        write(log, line)

    monkeypatch.setattr(AnswersLog, "_write", slowly)
    settings = HttpSettings(admin_key="admin", answers=tmp_path / "answers.jsonl")
    with serving(loaded(), settings) as url, httpx.Client(base_url=url, timeout=60) as client:
        body = {"prompt": "One", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as left:
            next(left.iter_lines())
        body |= {"max_tokens": 2, "stream": streams}
        client.post("/v1/completions", json=body)
        [line] = client.get(ROUTE, headers={"authorization": "Bearer admin"}).text.splitlines()
    kept = json.loads(line)
    assert kept["body"] == body
    assert kept["response"]["body"]["choices"][0]["finish_reason"] == "length"
