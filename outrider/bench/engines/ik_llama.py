"""ik_llama.cpp by its server, with and without weights repacked while they are loaded (`-rtr`)."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.bench.engines.driver import DriverRequest, serve
from outrider.bench.engines.engine import DRAFT_MODEL, PeerEngine, server_driver
from outrider.bench.engines.environments import Environment, EnvironmentFolder
from outrider.bench.engines.server import (
    DRAFT,
    DRAFT_TOKENS,
    SOURCES,
    ServerDriver,
    built,
    unpack,
)

NGRAM = ("--spec-type", "ngram-simple")
SUFFIX = ("--spec-type", "suffix:n_max=16")
SHORT_SUFFIX = ("--spec-type", "suffix:n_max=16,suffix_min_match_len=2")
MODEL = ("-md", DRAFT, "--draft-max", DRAFT_TOKENS)
STAGE = ("--spec-type", f"draft:n_max={DRAFT_TOKENS}")
DRAFTING: Mapping[str, tuple[str, ...]] = {
    "plain": (),
    "ngram-simple": NGRAM,
    "suffix": SUFFIX,
    "suffix, matches of 2": SHORT_SUFFIX,
    DRAFT_MODEL: MODEL,
    f"ngram-simple, then {DRAFT_MODEL}": (*NGRAM, *MODEL),
    f"suffix, then {DRAFT_MODEL}": (*SHORT_SUFFIX, *STAGE, *MODEL),
}
REPACKED = {f"{name} -rtr": (*flags, "-rtr") for name, flags in DRAFTING.items()}
FLAGS: Mapping[str, tuple[str, ...]] = {**DRAFTING, **REPACKED}
"""What its server is started with, by mode."""
SLACK = 64
"""Tokens that are asked beyond those that are wanted: it cuts the whole draft that passes the end."""
BUILD_INFO = """set(BUILD_NUMBER 0)
configure_file("${CMAKE_CURRENT_LIST_DIR}/../build-info.cpp.in" "${CMAKE_CURRENT_LIST_DIR}/../build-info.cpp")
"""


class IkLlamaDriver(ServerDriver):
    """Its way to ask for OpenAI's completions tells its drafts, which the other way does not."""

    path = "/v1/completions"

    def body(self, asked: DriverRequest, i: int) -> dict[str, Any]:
        """It tells ids of tokens with their probabilities alone, which cost it time."""
        body = super().body(asked, i)
        return body | {"logprobs": 1, "n_predict": asked.new_tokens + SLACK} if asked.ids else body

    def tokens(self, answer: Mapping[str, Any]) -> list[int]:
        """The ids of an answer's tokens; where they were not asked, those of its text."""
        [choice] = answer["choices"]
        if choice["logprobs"] is None:
            return list(self.call("POST", "/tokenize", {"content": choice["text"]})["tokens"])
        return [each["id"] for each in self.rows(answer)]

    def rows(self, answer: Mapping[str, Any]) -> list[Any]:
        """What an answer tells of each token's probability."""
        [choice] = answer["choices"]
        return list(choice["logprobs"]["content"])


def make(room: EnvironmentFolder) -> None:
    """The sources, with a file of cmake that they lack, and the server."""
    unpack(room, room.pins[0])
    scripts = room.place / SOURCES / "vendor" / "ik_llama.cpp" / "common" / "cmake"
    scripts.mkdir()
    (scripts / "build-info-gen-cpp.cmake").write_text(BUILD_INFO, encoding="utf-8")
    server_of(room)


def server_of(room: EnvironmentFolder) -> Path:
    """Its server."""
    sources = room.place / SOURCES / "vendor" / "ik_llama.cpp"
    return built(room, sources, "-DGGML_NATIVE=ON", "-DGGML_IQK_FA_ALL_QUANTS=OFF")


ENGINE = PeerEngine(
    title="ik_llama.cpp",
    modes=tuple(FLAGS),
    command=server_driver("ik_llama", server_of),
    environment=Environment(name="ik_llama", pins=("ik-llama-cpp-python==0.1.5",), make=make),
    digests_first=True,
    is_server=True,
    reads=".gguf",
)


if __name__ == "__main__":
    serve(IkLlamaDriver(Path(sys.argv[1]), FLAGS))
