"""Random checkpoints of variants of EAGLE in the forms of their authors, or with what our configs say beside them."""

from pathlib import Path

from outrider.lm.target_info import TargetInfo
from tests.world.published import Tensors, drawn, layer_of, layer_shapes, written


def griffin(folder: Path, around: TargetInfo, *, ours: bool = True) -> Tensors:
    """GRIFFIN, with a bias; that of its authors has an embedding of its own."""
    layer, size = layer_of(around), around.hidden_size
    inner = layer["intermediate_size"]
    shapes = layer_shapes(layer, "layers.0", size) | {"layers.0.mlp.down_proj.weight": (2 * size, inner)}
    shapes |= {
        "fc.fc.weight": (size, 2 * size),
        "fc.fc.bias": (size,),
        "fc.post_attention_layernorm.weight": (size,),
        "fc.mlp.input_layernorm.weight": (size,),
        "fc.mlp.up_proj.weight": (inner, 2 * size),
        "fc.mlp.down_proj.weight": (size, inner),
    }
    return _written(folder, around, layer, shapes, {"outrider_head": "griffin"} if ours else None)


def jakiro(
    folder: Path, around: TargetInfo, *, ours: bool = True, mixture: str = "features", expert_size: int = 12
) -> Tensors:
    """Jakiro, with a bias; that of its authors has an embedding of its own."""
    layer, size = layer_of(around), around.hidden_size
    plain = layer_shapes(layer, "layers.0", size)
    shapes = {name: shape for name, shape in plain.items() if ".mlp." not in name}
    shapes |= {"fc.weight": (size, 2 * size), "fc.bias": (size,), "layers.0.mlp_moe.gate.weight": (4, size)}
    for i in range(2):
        name = f"layers.0.mlp_moe.experts.{i}"
        shapes |= {f"{name}.{part}_proj.weight": (expert_size, size) for part in ("gate", "up")}
        shapes |= {f"{name}.down_proj.weight": (size, expert_size)}
    return _written(folder, around, layer, shapes, {"outrider_head": "jakiro", "mixture": mixture} if ours else None)


def poss(
    folder: Path, around: TargetInfo, *, ours: bool = True, fused: bool = False, count: int = 3, steps: int = 1
) -> Tensors:
    """PosS on an EAGLE head or, with `fused`, on an EAGLE-3 head in the flat form."""
    layer, size = layer_of(around), around.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (size, (3 if fused else 2) * size)}
    for i in range(count):
        shapes |= layer_shapes(layer, f"layers.{i}", 2 * size if fused else size)
        if fused:
            shapes |= {f"layers.{i}.{norm}.weight": (size,) for norm in ("input_layernorm", "hidden_norm")}
    if fused:
        shapes |= {"norm.weight": (size,), "lm_head.weight": (around.vocab_size, size)}
    else:
        shapes["fc.bias"] = (size,)
    return _written(
        folder, around, layer, shapes, {"outrider_head": "poss", "steps_per_specialist": steps} if ours else None
    )


def _written(
    folder: Path,
    around: TargetInfo,
    layer: dict[str, object],
    shapes: dict[str, tuple[int, ...]],
    ours: dict[str, object] | None,
) -> Tensors:
    if ours is None:
        shapes = shapes | {"embed_tokens.weight": (around.vocab_size, around.hidden_size)}
    tensors = drawn(shapes)
    config = {"architectures": ["LlamaForCausalLM"], **layer, **(ours or {})}
    written(folder, config, tensors, "pytorch_model.bin" if ours is None else "model.safetensors")
    return tensors
