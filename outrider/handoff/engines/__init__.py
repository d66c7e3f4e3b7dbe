"""What each engine needs: a file per engine."""

from outrider.handoff.engines import llama, openvino, sglang, transformers, vllm
from outrider.handoff.engines.engine import ExportTarget

KNOWN: dict[str, ExportTarget] = {
    "vllm": vllm.ENGINE,
    "sglang": sglang.ENGINE,
    "llama.cpp": llama.ENGINE,
    "openvino": openvino.ENGINE,
    "transformers": transformers.ENGINE,
}
"""The engines by name."""
