"""Random checkpoints of heads that guess blocks, in every published layout, and what they compute.

Both follow the descriptions of the layouts alone: nothing here uses the package's own heads.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, HEADS, SHARED, DIM, INNER, LAYERS = 32, 4, 2, 8, 48, 3
"""Sizes of the decoder layers; heads times their width is the hidden size, as in a tiny target."""
RANK, BLOCK, MASK = 6, 4, 0
STATE, GROUP, TOP = 10, 8, 5
"""Sizes of the parts that only Domino and DFlash 2 have."""
LAYER_CONFIG: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": SHARED,
    "head_dim": DIM,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "attention_bias": False,
    "tie_word_embeddings": False,
}


@dataclass(kw_only=True)
class Checkpoint:
    """A config and tensors, and what a reader must know of the layout.

    Attributes:
        config: What `config.json` holds.
        tensors: What the file of weights holds.
        taps: The entries of transformers' `hidden_states` that are read.
        from_anchor: Whether the anchor's position guesses.
        windows: Per layer, how far it sees; None: everything.
        causal: Per layer, whether a block sees no later position of itself.
        markov: The kind of sequential head.
        block: Positions of a block.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    taps: tuple[int, ...]
    from_anchor: bool = False
    windows: list[int | None] = field(default_factory=lambda: [None] * LAYERS)
    causal: list[bool] = field(default_factory=lambda: [False] * LAYERS)
    markov: str = "vanilla"
    block: int = BLOCK

    def save(self, folder: Path) -> str:
        """Write the two files."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file({name: tensor.contiguous() for name, tensor in self.tensors.items()}, folder / "model.safetensors")
        return str(folder)


def trunk(
    num_taps: int, vocab: int, *, separate: bool = False, apart: bool = False, seed: int = 0
) -> dict[str, Tensor]:
    """The tensors of a trunk.

    Args:
        separate: Whether it has an embedding of its own, and an output layer over every other token.
        apart: Whether the context has projections of its own.
    """
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, num_taps * HIDDEN),
        "hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
    }
    for i in range(LAYERS):
        shapes |= {f"layers.{i}.{name}.weight": (HIDDEN,) for name in ("input_layernorm", "post_attention_layernorm")}
        attention = f"layers.{i}.self_attn"
        queries, keys = HEADS * DIM, SHARED * DIM
        shapes |= {f"{attention}.q_proj.weight": (queries, HIDDEN), f"{attention}.o_proj.weight": (HIDDEN, queries)}
        shapes |= {f"{attention}.{name}_proj.weight": (keys, HIDDEN) for name in "kv"}
        if apart:
            shapes |= {f"{attention}.{name}_proj_target.weight": (keys, HIDDEN) for name in "kv"}
        shapes |= {f"{attention}.{name}_norm.weight": (DIM,) for name in "qk"}
        shapes |= {f"layers.{i}.mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes[f"layers.{i}.mlp.down_proj.weight"] = (HIDDEN, INNER)
    if separate:
        shapes |= {"embed_tokens.weight": (vocab, HIDDEN), "lm_head.weight": (vocab // 2, HIDDEN)}
    tensors = drawn(shapes, seed)
    if separate:
        # Token 2i + 1 stands at place i, so that its offset is i + 1.
        tensors["d2t"] = torch.arange(vocab // 2) + 1
        tensors["t2d"] = torch.arange(vocab) % 2 == 1
    return tensors


def drawn(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Random tensors in float64; norms near 1."""
    dice = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=dice, dtype=torch.float64) for name, shape in shapes.items()}
    return {
        name: 1 + 0.3 * tensor if tensor.dim() == 1 else tensor * 1.5 / tensor.shape[-1] ** 0.5
        for name, tensor in tensors.items()
    }


def markov(kind: str, vocab: int, outputs: int) -> dict[str, Tensor]:
    """The tensors of a sequential head, and of the confidence head beside it."""
    shapes: dict[str, tuple[int, ...]] = {
        "markov_head.markov_w1.weight": (vocab, RANK),
        "markov_head.markov_w2.weight": (outputs, RANK),
        "confidence_head.proj.weight": (1, HIDDEN + RANK),
        "confidence_head.proj.bias": (1,),
    }
    if kind == "gated":
        shapes |= {"markov_head.gate_proj.weight": (RANK, HIDDEN + RANK), "markov_head.gate_proj.bias": (RANK,)}
    if kind == "rnn":
        size = 3 * RANK
        shapes |= {"markov_head.joint_proj.weight": (size, 2 * RANK + HIDDEN), "markov_head.joint_proj.bias": (size,)}
    return drawn(shapes, seed=7)


REFINER = {
    "token_embed.weight": "w1.weight",
    "down_h.weight": "down_h.weight",
    "down_g.weight": "down_g.weight",
    "in_proj.weight": "in_proj.weight",
    "mix_l": "mix.L",
    "mlp_gate.weight": "mlp.gate_proj.weight",
    "mlp_up.weight": "mlp.up_proj.weight",
    "mlp_down.weight": "mlp.down_proj.weight",
    "readout.weight": "w2.weight",
}
"""The tensors of XPress's refiner in `speculators`, and in its authors' files."""


def refiner(vocab: int, outputs: int, *, published: bool = False) -> dict[str, Tensor]:
    """The tensors of XPress's refiner; those above the diagonal of its mixer count for nothing."""
    names = [f"xpress_head.{name}" for name in REFINER.values()]
    if not published:
        names = [f"refiner_head.{name}" for name in REFINER]
    inner = 2 * RANK
    shapes = [(vocab, RANK), (RANK, HIDDEN), (RANK, HIDDEN), (RANK, 3 * RANK), (RANK, BLOCK, BLOCK)]
    shapes += [(inner, RANK), (inner, RANK), (RANK, inner), (outputs, RANK)]
    # Its feed-forward is a product, so that large weights magnify rounding.
    return {name: tensor / 2 for name, tensor in drawn(dict(zip(names, shapes, strict=True)), seed=17).items()}


def speculators(kind: str, vocab: int, **more: Any) -> dict[str, Any]:
    """A config in the layout of `speculators`."""
    drafted = BLOCK if more.get("sample_from_anchor") else BLOCK - 1
    return {
        "architectures": [f"{kind}Speculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.5.0",
        "torch_dtype": "float64",
        "draft_vocab_size": vocab,
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "aux_hidden_state_layer_ids": [2, 1],
        "transformer_layer_config": {"model_type": "qwen3", "vocab_size": vocab, **LAYER_CONFIG},
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": drafted}],
            "verifier": {"name_or_path": "somewhere", "architectures": ["LlamaForCausalLM"]},
        },
        **more,
    }


def authors(architecture: str, vocab: int, inner: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A config in an author's own layout."""
    config = {"architectures": [architecture], "model_type": "qwen3", "vocab_size": vocab, **LAYER_CONFIG, **more}
    return config if inner is None else {**config, "dflash_config": inner}


def checkpoints(vocab: int) -> dict[str, Checkpoint]:
    """One random checkpoint of each layout and kind, for a target of width `HIDDEN` with three layers."""
    window = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 5}
    inner = {"mask_token_id": MASK, "target_layer_ids": [0, 1]}
    fusion = drawn({"layer_fusion_weights": (LAYERS, 2)}, 3)
    norms = drawn({f"fusion_norms.{i}.weight": (HIDDEN,) for i in range(LAYERS)}, 4)
    bare = {name: tensor for name, tensor in trunk(2, vocab, apart=True).items() if name != "fc.weight"}
    bare_too = {name: tensor for name, tensor in bare.items() if name != "hidden_norm.weight"}
    checkpoints_by_name = {
        "dflash": Checkpoint(config=speculators("dflash", vocab), tensors=trunk(2, vocab), taps=(2, 1)),
        "dflash-own-ends": Checkpoint(
            config=speculators("dflash", vocab, draft_vocab_size=vocab // 2, sample_from_anchor=True),
            tensors=trunk(2, vocab, separate=True),
            taps=(2, 1),
            from_anchor=True,
        ),
        "dflash-windows": Checkpoint(
            config=speculators(
                "dflash",
                vocab,
                transformer_layer_config={**LAYER_CONFIG, "vocab_size": vocab, **window},
                sliding_window_non_causal=False,
            ),
            tensors=trunk(2, vocab),
            taps=(2, 1),
            windows=[5, None, 5],
            causal=[True, False, True],
        ),
        "dflash-z-lab": Checkpoint(
            config=authors("DFlashDraftModel", vocab, inner, block_size=BLOCK, num_target_layers=3),
            tensors=trunk(2, vocab),
            taps=(1, 2),
        ),
        "dflash-z-lab-windows": Checkpoint(
            config=authors("DFlashDraftModel", vocab, {**inner, "causal": False}, block_size=BLOCK, **window),
            tensors=trunk(2, vocab),
            taps=(1, 2),
            windows=[5, None, 5],
        ),
        "jetspec": Checkpoint(
            config=authors(
                "DFlashDraftModel", vocab, {**inner, "causal_head": True}, block_size=BLOCK, num_target_layers=3
            ),
            tensors=trunk(2, vocab),
            taps=(1, 2),
            causal=[True] * LAYERS,
        ),
        "jetspec-automodel": Checkpoint(
            config=authors(
                "Qwen3DFlashDraftModel", vocab, {**inner, "causal": True}, block_size=BLOCK, is_causal=False
            ),
            tensors=trunk(2, vocab),
            taps=(1, 2),
            causal=[True] * LAYERS,
        ),
        "dflash-swa": Checkpoint(
            config=authors(
                "DFlashDraftModel", vocab, {**inner, "use_swa": True, "swa_window_size": 5}, block_size=BLOCK
            ),
            tensors=trunk(2, vocab),
            taps=(1, 2),
            windows=[5] * LAYERS,
        ),
        "dflare": Checkpoint(
            config=speculators("dflare", vocab),
            tensors={**bare_too, **norms, "fusion_weights": fusion["layer_fusion_weights"]},
            taps=(2, 1),
        ),
        "dflare-angelslim": Checkpoint(
            config=authors("QwenDFlareDraftModel", vocab, inner, block_size=BLOCK, num_target_layers=3),
            tensors={**bare, **fusion},
            taps=(1, 2),
        ),
        "dspark-flat": Checkpoint(
            config=authors(
                "Qwen3DSparkModel",
                vocab,
                block_size=BLOCK,
                target_layer_ids=[0, 1],
                mask_token_id=MASK,
                markov_rank=RANK,
                sample_from_anchor=True,
            ),
            tensors={**trunk(2, vocab), **markov("vanilla", vocab, vocab)},
            taps=(1, 2),
            from_anchor=True,
        ),
    }
    checkpoints_by_name["dspark-deepspec"] = Checkpoint(
        config=authors(
            "Qwen3DSparkModel",
            vocab,
            block_size=BLOCK,
            target_layer_ids=[0, 1],
            mask_token_id=MASK,
            markov_rank=RANK,
            markov_head_type="vanilla",
            num_anchors=512,
            enable_confidence_head=True,
            confidence_head_with_markov=True,
            **window,
        ),
        tensors={**trunk(2, vocab), **markov("vanilla", vocab, vocab)},
        taps=(1, 2),
        from_anchor=True,
        windows=[5, None, 5],
    )
    gru = drawn(
        {
            "prefix_gru.weight_ih_l0": (3 * STATE, HIDDEN),
            "prefix_gru.weight_hh_l0": (3 * STATE, STATE),
            "embed_proj.0.weight": (RANK, HIDDEN + STATE),
            "embed_proj.2.weight": (vocab, RANK),
        },
        11,
    )
    for shifted in (False, True):
        keys_of_domino = {"projector_type": "domino", "shift_label": shifted, "emb_dim": RANK, "gru_hidden_dim": STATE}
        name = "domino-shifted" if shifted else "domino"
        checkpoints_by_name[name] = Checkpoint(
            config=authors(
                "DFlashDraftModel" if shifted else "DominoDraftModel",
                vocab,
                {**inner, **keys_of_domino, "pure_draft_prefix_len": 1},
                block_size=BLOCK + shifted,
            ),
            tensors={**trunk(2, vocab), **gru},
            taps=(1, 2),
            from_anchor=shifted,
            block=BLOCK + shifted,
        )
    kernels: dict[str, tuple[int, ...]] = {}
    for name in (f"layers.{i}.{part}_conv" for i in range(LAYERS) for part in ("attention", "mlp")):
        kernels |= {f"{name}.base_kernel": (2, 2, HIDDEN)}
        kernels |= {f"{name}.kernel_projection.weight": (2 * 2 * HIDDEN // GROUP, HIDDEN)}
    codes: dict[str, tuple[int, ...]] = {
        "candidate_selector.predecessor_codebook": (vocab, RANK),
        "candidate_selector.successor_codebook": (vocab, RANK),
        "candidate_selector.hidden_projection.weight": (RANK, HIDDEN),
    }
    convolved = {name: tensor * HIDDEN**0.5 / 3 for name, tensor in drawn(kernels, 12).items() if "base" in name}
    convolved |= {name: tensor / 3 for name, tensor in drawn(kernels, 12).items() if "base" not in name}
    keys = {"conv_kernel_size": 2, "conv_group_size": GROUP, "selector_rank": RANK, "selector_top_k": TOP}
    checkpoints_by_name["dflash2"] = Checkpoint(
        config=authors("DFlash2DraftModel", vocab, {**inner, **keys, "block_size": BLOCK}, is_causal=False),
        tensors={**trunk(2, vocab), **convolved, **drawn(codes, 13)},
        taps=(1, 2),
    )
    checkpoints_by_name["dflash2-automodel"] = Checkpoint(
        config=authors(
            "Qwen3DFlash2DraftModel",
            vocab,
            {**inner, **keys, "block_size": BLOCK, "output_multiplier": 1.5, "final_logit_softcapping": 4.0},
            is_causal=False,
            **(window | {"layer_types": ["sliding_attention"] * LAYERS}),
        ),
        tensors={**trunk(2, vocab), **convolved, **drawn(codes, 13)},
        taps=(1, 2),
        windows=[5] * LAYERS,
    )
    sizes = {"xpress_rank": RANK, "xpress_mlp_ratio": 2, "num_jacobi_passes": 3}
    checkpoints_by_name["xpress"] = Checkpoint(
        config=speculators("xpress", vocab, sample_from_anchor=False, **sizes),
        tensors={**trunk(2, vocab), **refiner(vocab, vocab)},
        taps=(2, 1),
    )
    checkpoints_by_name["xpress-anchor"] = Checkpoint(
        config=speculators("xpress", vocab, sample_from_anchor=True, draft_vocab_size=vocab // 2, **sizes),
        tensors={**trunk(2, vocab, separate=True), **refiner(vocab, vocab // 2)},
        taps=(2, 1),
        from_anchor=True,
    )
    sizes = {"xpress_rank": RANK, "xpress_mlp_hidden": 2 * RANK, "xpress_num_passes": 5, "xpress_block_size": BLOCK}
    checkpoints_by_name["xpress-uiuc"] = Checkpoint(
        config=authors("Qwen3XPressModel", vocab, inner, num_target_layers=3, **sizes),
        tensors={**trunk(2, vocab), **refiner(vocab, vocab, published=True)},
        taps=(1, 2),
    )
    for kind in ("vanilla", "gated", "rnn"):
        separate = kind == "gated"
        checkpoints_by_name[f"dspark-{kind}"] = Checkpoint(
            config=speculators(
                "dspark", vocab, sample_from_anchor=not separate, markov_rank=RANK, markov_head_type=kind
            ),
            tensors={**trunk(2, vocab, separate=separate), **markov(kind, vocab, vocab // 2 if separate else vocab)},
            taps=(2, 1),
            from_anchor=not separate,
            markov=kind,
        )
    return checkpoints_by_name


def rms(states: Tensor, weight: Tensor) -> Tensor:
    return weight * states / (states.pow(2).mean(-1, keepdim=True) + LAYER_CONFIG["rms_norm_eps"]).sqrt()


def turned(heads: Float[Tensor, "positions heads dim"], positions: Tensor) -> Tensor:
    """Rotary positions, pair by pair."""
    half = DIM // 2
    angles = positions[:, None] / LAYER_CONFIG["rope_theta"] ** (torch.arange(half) * 2.0 / DIM)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    left, right = heads[..., :half], heads[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def block_logits(
    checkpoint: Checkpoint, hidden_states: tuple[Tensor, ...], anchor: int, embedding: Tensor, output: Tensor
) -> tuple[Float[Tensor, "block hidden"], Float[Tensor, "block vocab"]]:
    """Output features and logits of the block behind a text, before any sequential head.

    Args:
        hidden_states: What transformers returns for the text before the anchor, without the batch axis.
        embedding: The target's.
        output: The weight of the target's output layer.
    """
    w = checkpoint.tensors
    features = torch.cat([hidden_states[tap] for tap in checkpoint.taps], -1)
    length = len(features)
    size = checkpoint.block
    states = w.get("embed_tokens.weight", embedding)[torch.tensor([anchor] + [MASK] * (size - 1))]
    places = torch.arange(length + size, dtype=torch.float64)
    for i in range(LAYERS):
        at = f"layers.{i}.self_attn"
        context = rms(features @ w["fc.weight"].T, w["hidden_norm.weight"]) if "fc.weight" in w else None
        if context is None:
            mixture = w.get("fusion_weights", w.get("layer_fusion_weights"))[i].softmax(-1)
            mixed = sum(share * hidden_states[tap] for share, tap in zip(mixture, checkpoint.taps, strict=True))
            context = rms(mixed, w.get(f"fusion_norms.{i}.weight", w.get("hidden_norm.weight")))
        inputs = rms(states, w[f"layers.{i}.input_layernorm.weight"])
        before = inputs
        inputs = convolved(w, f"layers.{i}.attention_conv", 0, before, inputs)

        def projected(name: str, at: str = at, context: Tensor = context, inputs: Tensor = inputs) -> Tensor:
            name_of_target = f"{at}.{name}_proj_target.weight"
            of_context = context @ w[name_of_target if name_of_target in w else f"{at}.{name}_proj.weight"].T
            return torch.cat([of_context, inputs @ w[f"{at}.{name}_proj.weight"].T]).view(-1, SHARED, DIM)

        queries = rms((inputs @ w[f"{at}.q_proj.weight"].T).view(size, HEADS, DIM), w[f"{at}.q_norm.weight"])
        queries = turned(queries, places[length:])
        keys, values = turned(rms(projected("k"), w[f"{at}.k_norm.weight"]), places), projected("v")
        mixed = torch.zeros(size, HEADS, DIM, dtype=torch.float64)
        for place in range(size):
            for head in range(HEADS):
                group = head * SHARED // HEADS
                scores = keys[:, group] @ queries[place, head] / DIM**0.5
                for key in range(length + size):
                    ahead = key - (length + place)
                    if (checkpoint.causal[i] and ahead > 0) or (
                        checkpoint.windows[i] is not None and abs(ahead) >= checkpoint.windows[i]
                    ):
                        scores[key] = -torch.inf
                mixed[place, head] = scores.softmax(0) @ values[:, group]
        mixed = mixed.flatten(1) @ w[f"{at}.o_proj.weight"].T
        states = states + convolved(w, f"layers.{i}.attention_conv", 1, before, mixed)
        before = rms(states, w[f"layers.{i}.post_attention_layernorm.weight"])
        inputs = convolved(w, f"layers.{i}.mlp_conv", 0, before, before)
        gate = inputs @ w[f"layers.{i}.mlp.gate_proj.weight"].T
        inner = gate * gate.sigmoid() * (inputs @ w[f"layers.{i}.mlp.up_proj.weight"].T)
        inner = inner @ w[f"layers.{i}.mlp.down_proj.weight"].T
        states = states + convolved(w, f"layers.{i}.mlp_conv", 1, before, inner)
    hidden = rms(states, w["norm.weight"])
    logits = hidden @ w.get("lm_head.weight", output).T
    inner = checkpoint.config.get("dflash_config", {})
    logits = logits * inner.get("output_multiplier", 1.0)
    cap = inner.get("final_logit_softcapping")
    return hidden, logits if cap is None else (logits / cap).tanh() * cap


def convolved(
    w: dict[str, Tensor],
    name: str,
    side: int,
    read: Float[Tensor, "block hidden"],
    states: Float[Tensor, "block hidden"],
) -> Float[Tensor, "block hidden"]:
    """States of a block behind a dynamic convolution, or as they are where the head has none.

    Args:
        side: 0 before a layer, 1 behind it.
        read: What the layer reads, without the convolution.
    """
    if f"{name}.base_kernel" not in w:
        return states
    base = w[f"{name}.base_kernel"]
    kernels = (read @ w[f"{name}.kernel_projection.weight"].T).view(len(states), 2, base.shape[1], -1)
    convolved = torch.zeros_like(states)
    for k in range(len(states)):
        for s in range(base.shape[1]):
            if k >= s:
                # Entry c has the kernel of its group.
                kernel = base[side, s] + kernels[k, side, s][torch.arange(HIDDEN) // GROUP]
                convolved[k] += kernel * states[k - s]
    return convolved


def guess_logits(
    checkpoint: Checkpoint,
    hidden_states: tuple[Tensor, ...],
    text: tuple[int, ...],
    drafted: tuple[int, ...],
    embedding: Tensor,
    output: Tensor,
) -> Float[Tensor, " vocab"]:
    """The logits after a text and some draft tokens behind it.

    Args:
        hidden_states: What transformers returns for the text without its last token.
    """
    hidden, logits = block_logits(checkpoint, hidden_states, text[-1], embedding, output)
    first = 0 if checkpoint.from_anchor else 1
    depth, w = len(drafted), checkpoint.tensors
    if "prefix_gru.weight_hh_l0" in w:
        return logits[first + depth] + domino_correction(
            checkpoint, (text[-1], *drafted), hidden[first + depth], embedding
        )
    if any("down_g" in name for name in w):
        return logits[first + depth] + refinement(w, hidden, (*text[-2:], *drafted)[1 - first :])
    if "candidate_selector.predecessor_codebook" in w:
        base, before = logits[first + depth], (text[-1], *drafted)[-1]
        chosen = base.topk(TOP).indices
        codes = w["candidate_selector.hidden_projection.weight"] @ hidden[first + depth]
        codes = codes * w["candidate_selector.predecessor_codebook"][before]
        scores = torch.full_like(base, -torch.inf)
        for b in chosen.tolist():
            scores[b] = base[b] + codes @ w["candidate_selector.successor_codebook"][b]
        return scores
    if "markov_head.markov_w1.weight" not in w:
        return logits[first + depth]
    state = torch.zeros(RANK, dtype=torch.float64)
    for i, token in enumerate((text[-1], *drafted)):
        read = w["markov_head.markov_w1.weight"][token]
        if checkpoint.markov == "gated":
            joint = torch.cat([hidden[first + i], read])
            read = read * (w["markov_head.gate_proj.weight"] @ joint + w["markov_head.gate_proj.bias"]).sigmoid()
        elif checkpoint.markov == "rnn":
            joint = torch.cat([state, read, hidden[first + i]])
            gate, new, out = (w["markov_head.joint_proj.weight"] @ joint + w["markov_head.joint_proj.bias"]).split(RANK)
            state = gate.sigmoid() * state + (1 - gate.sigmoid()) * new.tanh()
            read = out.tanh()
    return logits[first + depth] + w["markov_head.markov_w2.weight"] @ read


def domino_correction(
    checkpoint: Checkpoint, tokens: tuple[int, ...], hidden: Float[Tensor, " hidden"], embedding: Tensor
) -> Float[Tensor, " vocab"] | float:
    """What Domino adds to the logits of a guess, behind the anchor and some draft tokens."""
    w = checkpoint.tensors
    if len(tokens) <= checkpoint.config["dflash_config"]["pure_draft_prefix_len"]:
        return 0.0
    layer = torch.nn.GRU(HIDDEN, STATE, bias=False, dtype=torch.float64)
    with torch.no_grad():
        for name in ("weight_ih_l0", "weight_hh_l0"):
            getattr(layer, name).copy_(w[f"prefix_gru.{name}"])
        state = layer(embedding[torch.tensor(tokens)])[0][-1]
    inner = w["embed_proj.0.weight"] @ torch.cat([hidden, state])
    return w["embed_proj.2.weight"] @ (inner * inner.sigmoid())


def refinement(
    w: dict[str, Tensor], hidden: Float[Tensor, "block hidden"], before: tuple[int, ...]
) -> Float[Tensor, " vocab"]:
    """What XPress adds to the logits of the last of some positions from the first of a block on.

    Args:
        before: The token before the one that each of these positions stands for, or guesses.
    """
    at = {own: next(t for n, t in w.items() if n.partition(".")[2] in (own, name)) for own, name in REFINER.items()}
    mean, inputs = hidden.mean(0), []
    for k, token in enumerate(before):
        parts = [at["down_h.weight"] @ hidden[k], at["down_g.weight"] @ mean, at["token_embed.weight"][token]]
        inputs.append(at["in_proj.weight"] @ torch.cat(parts))
    last, mixed = len(before) - 1, inputs[-1].clone()
    for j, each in enumerate(inputs):
        for channel in range(RANK):
            mixed[channel] += at["mix_l"][channel, last, j] * each[channel]
    gate = at["mlp_gate.weight"] @ mixed
    mixed = mixed + at["mlp_down.weight"] @ (gate * gate.sigmoid() * (at["mlp_up.weight"] @ mixed))
    return at["readout.weight"] @ mixed
