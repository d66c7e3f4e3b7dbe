"""llama.cpp: `plain`, `ngram` and `draft model`. Its driver is `llama_driver.cpp`; here is what it needs."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.bench.engines.engine import DRAFT_MODEL, Engine, digest
from outrider.bench.engines.environments import CannotMake, Environment, Room

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTSIDE = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}


def read(place: Path) -> dict[str, NDArray[np.uint16]]:
    """The tensors of a file of safetensors, all of bfloat16, as the 16 bits of each number."""
    raw = place.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    found = {}
    for name, entry in json.loads(raw[8 : 8 + size]).items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise ValueError(f"{name} must be of bfloat16, got {entry['dtype']}")
        first, last = (8 + size + offset for offset in entry["data_offsets"])
        found[name] = np.frombuffer(raw[first:last], np.uint16).reshape(entry["shape"])
    return found


def name_of(tensor: str) -> str:
    """What llama.cpp calls a tensor."""
    if tensor in OUTSIDE:
        return f"{OUTSIDE[tensor]}.weight"
    layer, part = tensor.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
    return f"blk.{layer}.{NAMES[part]}.weight"


def interleaved(bits: NDArray[np.uint16], heads: int) -> NDArray[np.uint16]:
    """Rows of queries or keys in the order of llama.cpp's rotation, which turns neighbours instead of halves."""
    return bits.reshape(heads, 2, -1, bits.shape[1]).swapaxes(1, 2).reshape(bits.shape)


def write_model(source: str, out: str, dtype: str) -> None:
    """Write a Llama of Hugging Face and its vocabulary in llama.cpp's format.

    The weights keep their values: they are written as bfloat16 or as float32, as asked for.
    """
    import gguf

    config = json.loads((Path(source) / "config.json").read_text(encoding="utf-8"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    add_vocabulary(writer, json.loads((Path(source) / "tokenizer.json").read_text(encoding="utf-8")), config)
    for tensor, bits in read(Path(source) / "model.safetensors").items():
        if tensor == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        if "q_proj" in tensor or "k_proj" in tensor:
            bits = interleaved(bits, heads if "q_proj" in tensor else kv_heads)
        if bits.ndim == 1 or dtype == "float32":
            writer.add_tensor(name_of(tensor), (bits.astype(np.uint32) << 16).view(np.float32))
        else:
            raw = np.ascontiguousarray(bits).view(np.uint8)
            writer.add_tensor(name_of(tensor), raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_vocabulary(writer: Any, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    """The tokens: llama.cpp compares those of target and draft model."""
    import gguf

    texts = [f"<unused {i}>" for i in range(config["vocab_size"])]
    kinds = [gguf.TokenType.NORMAL] * len(texts)
    for text, i in tokenizer["model"]["vocab"].items():
        texts[i] = text
    for added in tokenizer["added_tokens"]:
        texts[added["id"]], kinds[added["id"]] = added["content"], gguf.TokenType.CONTROL
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def convert(room: Room, source: Path, out: Path, dtype: str) -> None:
    """As a file."""
    room.call("outrider.bench.engines.llama", "write_model", source, out, dtype)


def make(room: Room) -> None:
    """llama.cpp, compiled for this machine; its sources stay, because the driver is compiled against them."""
    compiler()
    llama, gguf = room.pins
    sources = room.place / "sources"
    room.pip("download", "--no-deps", "--no-binary", llama.partition("==")[0], "--dest", sources, llama)
    [archive] = sources.glob("*.tar.gz")
    shutil.unpack_archive(archive, sources, filter="data")
    [folder] = (path for path in sources.iterdir() if path.is_dir())
    folder.rename(room.place / "llama")
    # Without the library for pictures, which nothing here needs and which takes a third of the time.
    room.pip("install", "--config-settings=cmake.args=-DLLAVA_BUILD=OFF", room.place / "llama", gguf)


def compiler() -> str:
    """A C++ compiler.

    Raises:
        CannotMake: There is none.
    """
    found = [name for name in ("c++", "g++", "clang++") if shutil.which(name)]
    if not found:
        raise CannotMake("there is no C++ compiler; install one (c++, g++ or clang++)")
    return found[0]


def command(room: Room | None) -> list[str]:
    """Starts the driver, compiled before if its source is new."""
    if room is None:
        raise CannotMake("llama.cpp has an environment of its own")
    source = Path(__file__).with_name("llama_driver.cpp")
    driver = room.place / f"driver-{digest(source)}"
    if not driver.exists():
        below = room.place / "llama" / "vendor" / "llama.cpp"
        library = sorted(room.place.glob("venv/**/libllama-common.so"))[0]
        include = [f"-I{below / part}" for part in ("common", "include", "ggml/include", "vendor")]
        names = ["-lllama-common", "-lllama", "-lggml", "-lggml-base", "-lggml-cpu"]
        # An old tag, because the libraries find each other by the path of the program.
        link = [f"-L{library.parent}", *names, f"-Wl,--disable-new-dtags,-rpath,{library.parent}"]
        # llama.cpp's environment reads this file too, and has no Outrider.
        from outrider.core import files

        with files.replaced(driver) as fresh:
            room.run(compiler(), "-O3", "-march=native", "-std=c++17", *include, source, "-o", fresh, *link)
    return [str(driver)]


ENGINE = Engine(
    title="llama.cpp",
    modes=("plain", "ngram", DRAFT_MODEL),
    command=command,
    environment=Environment(name="llama", pins=("llama-cpp-python==0.3.36", "gguf==0.19.0"), make=make),
    convert=convert,
    exports="llama.cpp",
)
