"""llama.cpp by its server: `plain`, `ngram-simple` and `draft model`; and what writes models in its format."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.bench.engines.driver import serve
from outrider.bench.engines.engine import DRAFT_MODEL, PeerEngine, server_driver
from outrider.bench.engines.environments import HERE, Environment, EnvironmentFolder
from outrider.bench.engines.server import DRAFT, DRAFT_TOKENS, SOURCES, ServerDriver, built, unpack

FLAGS: Mapping[str, tuple[str, ...]] = {
    "plain": (),
    "ngram-simple": ("--spec-type", "ngram-simple"),
    DRAFT_MODEL: ("-md", DRAFT, "--spec-type", "draft-simple", "--spec-draft-n-max", DRAFT_TOKENS),
}
"""What its server is started with, by mode."""
SCRIPTS = Path(SOURCES) / "vendor" / "llama.cpp"
"""Where the folder of an environment has llama.cpp's own sources, with the program that converts models."""


def write_model(scripts: str, source: str, out: str, dtype: str) -> None:
    """Write a model of Hugging Face in llama.cpp's format, by llama.cpp's own classes, one for each architecture.

    The weights keep their values: they are written as bfloat16 or as float32, as asked for. Only ids of tokens pass
    between Outrider and llama.cpp, so the vocabulary is written in one way for all, and llama.cpp need not know how the
    tokenizer splits texts.
    """
    sys.path[:0] = [scripts, str(Path(scripts) / "gguf-py")]
    import gguf
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    hparams = ModelBase.load_hparams(Path(source), False)
    name = get_model_architecture(hparams, ModelType.TEXT)
    try:
        known: Any = get_model_class(name)
    except NotImplementedError:
        sys.exit(f"error: llama.cpp does not know the architecture {name}")
    kind = gguf.LlamaFileType.ALL_F32 if dtype == "float32" else gguf.LlamaFileType.MOSTLY_BF16

    class Written(known):  # type: ignore[misc]
        """The model with the vocabulary of `add_vocabulary`."""

        model_arch = known.model_arch

        def set_vocab(self) -> None:
            add_vocabulary(self.gguf_writer, Path(source), hparams.get("text_config") or hparams)

    Written(Path(source), kind, Path(out)).write()


def add_vocabulary(writer: Any, source: Path, config: dict[str, Any]) -> None:
    """The tokens: llama.cpp compares those of target and draft model."""
    import gguf

    texts = [f"<unused {i}>" for i in range(config["vocab_size"])]
    kinds = [gguf.TokenType.NORMAL] * len(texts)
    file = source / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"model": {}}
    vocab, merges = tokenizer["model"].get("vocab", {}), tokenizer["model"].get("merges") or [texts[:2]]
    # A unigram tokenizer has a list of texts and their scores.
    ids = vocab.items() if isinstance(vocab, dict) else ((text, i) for i, (text, _) in enumerate(vocab))
    for text, i in ids:
        texts[i] = text
    for added in tokenizer.get("added_tokens", ()):
        texts[added["id"]], kinds[added["id"]] = added["content"], gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    for name, add in (("bos_token_id", writer.add_bos_token_id), ("eos_token_id", writer.add_eos_token_id)):
        id = config.get(name)
        # Several tokens may end a text; no run ends at one.
        first = id[0] if isinstance(id, list) else id
        if first is not None:
            add(first)
    writer.add_add_bos_token(False)


def convert(room: EnvironmentFolder, source: Path, out: Path, dtype: str) -> None:
    """As a file. This process's Python runs llama.cpp's program, which needs torch and transformers."""
    room.call("outrider.bench.engines.llama", "write_model", room.place / SCRIPTS, source, out, dtype, python=HERE)


def make(room: EnvironmentFolder) -> None:
    """The sources of llama.cpp, and its server."""
    llama, gguf = room.pins
    unpack(room, llama)
    room.pip("install", gguf)
    server_of(room)


def server_of(room: EnvironmentFolder) -> Path:
    """Its server."""
    return built(room, room.place / SCRIPTS)


ENGINE = PeerEngine(
    title="llama.cpp",
    modes=tuple(FLAGS),
    command=server_driver("llama", server_of),
    environment=Environment(name="llama", pins=("llama-cpp-python==0.3.36", "gguf==0.19.0"), make=make),
    convert=convert,
    digests_first=True,
    is_server=True,
    exports="llama.cpp",
    reads=".gguf",
)


if __name__ == "__main__":
    serve(ServerDriver(Path(sys.argv[1]), FLAGS))
