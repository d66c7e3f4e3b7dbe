"""The page, and the stream of tokens with their kinds."""

import json
import re
import shutil
import subprocess
import time
from importlib import resources

import pytest

PROMPT = "One day, a boy named Tim went to the park with his dog. They"


def stream(client, **fields) -> list[dict]:
    """The events of a stream."""
    body = {"prompt": PROMPT, "max_tokens": 32, "temperature": 0} | fields
    with client.stream("POST", "/v1/outrider/stream", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_the_page_needs_nothing_from_elsewhere(client):
    page = client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"].startswith("default-src 'self'")
    links = re.findall(r'(?:href|src)="([^"]+)"', page.text)
    assert {"page/page.js", "page/page.css"} <= set(links)
    for link in links:
        answer = client.get(f"/{link}")
        assert answer.status_code == 200, link
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", answer.text), link
    assert not re.search(r"https?://| style=| on\w+=|<script>", page.text)


@pytest.mark.parametrize("name", ["__init__.py", "routes.py", "..%2fapp.py", "%2e%2e/app.py"])
def test_other_files_are_not_sent(client, name):
    assert client.get(f"/page/{name}").status_code == 404


def test_every_element_that_the_script_names_is_on_the_page():
    folder = resources.files("outrider.serve.page")
    page, script = (folder.joinpath(name).read_text("utf-8") for name in ("index.html", "page.js"))
    wanted = set(re.findall(r'\bat\("(\w+)"\)', script))
    assert wanted <= set(re.findall(r'id="(\w+)"', page)), wanted


def test_every_series_that_the_script_names_is_told(client):
    script = resources.files("outrider.serve.page").joinpath("page.js").read_text("utf-8")
    names = re.findall(r'"((?:vllm|outrider):\w+)"', script)
    text = client.get("/metrics").text
    assert len(names) == 7
    assert [name for name in names if not re.search(rf"^{name}[ {{]", text, re.MULTILINE)] == []


def test_tokens_come_with_their_kinds_and_the_text_is_whole(client):
    events = stream(client)
    tokens = [token for event in events for token in event["tokens"]]
    assert len(tokens) == events[-1]["output"]["num_tokens"]
    plain = client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 32, "temperature": 0}).json()
    assert "".join(token["text"] for token in tokens) == plain["choices"][0]["text"]
    kinds = {token["kind"] for token in tokens}
    assert kinds <= {"accepted", "recovered", "bonus", "plain"}
    assert "accepted" in kinds
    for event in events:
        if "step" in event and "output" not in event:
            accepted = [token for token in event["tokens"] if token["kind"] == "accepted"]
            assert len(accepted) == event["step"]["num_accepted_tokens"]


def test_the_tree_of_a_step_holds_its_tokens(client, engine):
    events = stream(client, tree=True)
    shown = [event for event in events if event.get("tree")]
    assert shown
    for event in shown:
        nodes = event["tree"]
        assert [node["parent"] < i for i, node in enumerate(nodes)] == [True] * len(nodes)
        path = [node["id"] for node in nodes if node["kind"] in ("accepted", "recovered", "bonus", "plain")]
        if "output" not in event:
            assert path[-1] == nodes[-1]["id"]
    ended = time.monotonic() + 10
    while engine.watch is not None and time.monotonic() < ended:
        time.sleep(0.01)
    assert engine.watch is None


def test_a_chat_of_several_turns_is_answered_as_the_chat_route_answers_it(client):
    talk = [{"role": "user", "content": "Tell me a story."}]
    for question in ("And then?", "Why?"):
        body = {"messages": talk, "max_tokens": 12, "temperature": 0}
        wanted = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
        assert stream(client, prompt=None, **body)[-1]["output"]["text"] == wanted
        talk += [{"role": "assistant", "content": wanted}, {"role": "user", "content": question}]
    assert client.get("/server_info").json()["chat_template"] is True


def test_a_wrong_field_is_named(client):
    for body in ({"prompt": ""}, {}, {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}):
        wrong = client.post("/v1/outrider/stream", json=body)
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_code_is_told_from_prose():
    script = resources.files("outrider.serve.page").joinpath("page.js").read_text("utf-8")
    function = re.search(r"^function codeRanges.*?^}", script, re.MULTILINE | re.DOTALL)[0]
    texts = [
        "Once upon a time\nthere was a boy: Tim.\nHe ran.",
        "Here:\n```python\nx = 1\n```\nDone.",
        "```\nx",
        "def f(x):\n    return x\n",
        "One line:",
    ]
    code = f"{function}\nconsole.log(JSON.stringify({json.dumps(texts)}.map(codeRanges)))"
    found = json.loads(subprocess.run(["node", "-e", code], capture_output=True, check=True, text=True).stdout)
    cut = [[text[a:b] for a, b in ranges] for text, ranges in zip(texts, found, strict=True)]
    assert cut == [[], ["```python\nx = 1\n```"], ["```\nx"], [texts[3]], []]
