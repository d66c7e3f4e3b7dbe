"""Forwards of a few tokens: a server's are those of tokens that it had not read."""

from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider import InputError
from outrider.bench.engines.server import ServerDriver
from outrider.embedded import EMBEDDED_DRAFT, EMBEDDED_TARGET
from recipes import forwards
from recipes.forwards import ServedForwards


class FakeServer(ServerDriver):
    """A server that keeps what it has read, and says token 5 behind everything. A second takes a token of a prompt."""

    def __init__(self, least: int = 1) -> None:
        self.kept: list[int] = []
        self.least = least

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """What it tells of its times."""
        prompt = body["prompt"]
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, self.kept, strict=False)))
        read = max(self.least, len(prompt) - same)
        self.kept = [*prompt, 5]
        return {"timings": {"prompt_n": read, "prompt_ms": 1000.0 * read}}


def test_a_server_is_timed_over_the_tokens_behind_a_text_that_it_has_read():
    served = ServedForwards(FakeServer())
    assert [served(tokens, context) for context in (7, 300) for tokens in (1, 5, 8)] == [1.0, 5.0, 8.0] * 2


def test_a_server_that_reads_other_numbers_of_tokens_is_no_measure():
    with pytest.raises(RuntimeError, match="the server read 3 tokens instead of 1"):
        ServedForwards(FakeServer(least=3))(1, 20)


class PartsOfCharacters(FakeServer):
    """A server that cannot tell what it says behind every second prompt."""

    asked = 0

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Its times, or that it refuses."""
        timings = super().call(method, path, body)
        self.asked += 1
        if self.asked % 2:
            raise ValueError('{"error":{"message":"[json.exception.type_error.316] incomplete UTF-8 string"}}')
        return timings


def test_a_server_that_said_a_part_of_a_character_is_asked_again():
    served = ServedForwards(PartsOfCharacters())
    assert [served(tokens, 7) for tokens in (1, 5, 8)] == [1.0, 5.0, 8.0]


def test_what_else_a_server_refuses_is_told():
    server = FakeServer()
    server.call = lambda *_: (_ for _ in ()).throw(ValueError("no such path"))  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="no such path"):
        ServedForwards(server)(1, 7)


def test_a_file_has_a_line_for_each_context(tmp_path):
    files = pytest.importorskip("tests.world.gguf_files")
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_DRAFT, dtype=torch.float32)
    file = files.write_gguf(tmp_path / "target.gguf", model, AutoTokenizer.from_pretrained(EMBEDDED_TARGET))
    forwards.main(target=file, out=tmp_path / "out", **forwards.QUICK)
    lines = (tmp_path / "out" / "table.md").read_text().splitlines()
    assert [line.split("|")[2].strip() for line in lines if line.startswith("| outrider")] == ["32", "64"]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [({"engines": "lama"}, "--engines must be of outrider, llama"), ({"target": Path("/no/such")}, "there is no file")],
)
def test_wrong_input_is_told(tmp_path, wrong, sentence):
    file = tmp_path / "target.gguf"
    file.touch()
    with pytest.raises(InputError, match=sentence):
        forwards.main(**{"target": file, **forwards.QUICK, **wrong})
