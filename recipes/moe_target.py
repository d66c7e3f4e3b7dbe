"""Train a small mixture-of-experts target on text, with the embedded target's tokenizer, to prune experts from it.

A Mixtral of 9 million parameters: 6 layers of 192, with 8 experts each, of which every token uses 2. The loss is the
cross-entropy of the next token, plus transformers' loss that balances the experts. The batch of a step depends only on
the seed and the step, and a checkpoint is written every `--save-every` steps. After an interrupt, the same command
goes on from it and ends with the same weights.
"""

import json
import math
from pathlib import Path
from typing import Annotated

import torch
import typer
from jaxtyping import Int
from rich import print
from torch import Tensor
from transformers import AutoTokenizer, MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerBase

from outrider.cli.prune import read_texts
from outrider.core import files
from outrider.core.destination import check_free
from outrider.core.types import InputError
from outrider.embedded import EMBEDDED_TARGET
from outrider.surgery.checkpoint import write
from outrider.training.options import DataOptions
from recipes.trained import shape

SHAPE = shape(6, 192, 256) | {"num_local_experts": 8, "num_experts_per_tok": 2}
QUICK = {"steps": 4, "rows": 2, "length": 32, "save_every": 2, "num_tokens": 2000}
BALANCE = 0.02
"""Weight of the loss that balances the experts."""
CHECKPOINT = "checkpoint.pt"


def mixtral(tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> MixtralForCausalLM:
    """A fresh Mixtral with tied embeddings over the tokenizer's vocabulary."""
    config = MixtralConfig(
        vocab_size=len(tokenizer),
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        rms_norm_eps=1e-6,
        router_aux_loss_coef=BALANCE,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **SHAPE,
    )
    torch.manual_seed(seed)
    return MixtralForCausalLM(config)


def read_stream(data: Path, tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> Int[Tensor, " tokens"]:
    """All documents as one stream of token ids, each document after an end token."""
    texts = read_texts(DataOptions(data=(str(data),)), tokenizer, num_tokens)
    end = tokenizer.eos_token_id
    return torch.tensor([token for text in texts for token in (end, *text)], dtype=torch.int32)


def batch(stream: Int[Tensor, " tokens"], rows: int, length: int, seed: int, step: int) -> Int[Tensor, "rows length"]:
    """Random windows of the stream, by seed and step."""
    dice = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(0, len(stream) - length + 1, (rows,), generator=dice)
    return torch.stack([stream[s : s + length] for s in starts.tolist()]).long()


def rate(step: int, steps: int, peak: float, warmup: int = 100) -> float:
    """A linear rise, then a cosine to a twentieth."""
    return peak * min(1, (step + 1) / warmup) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def train(
    stream: Int[Tensor, " tokens"],
    model: MixtralForCausalLM,
    out: Path,
    *,
    steps: int,
    rows: int,
    length: int,
    learning_rate: float,
    save_every: int,
    seed: int,
) -> None:
    """Train a model in place, from the checkpoint of an earlier run if there is one.

    Raises:
        InputError: The text is shorter than a row, or the checkpoint is of a run with other settings.
    """
    if len(stream) < length:
        raise InputError(f"the text has {len(stream)} tokens, and a row needs {length}; give more text or --length")
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.05)
    settings = {"steps": steps, "rows": rows, "length": length, "learning_rate": learning_rate, "seed": seed}
    settings["tokens"] = len(stream)
    begun, place = 0, out / CHECKPOINT
    if place.exists():
        saved = torch.load(place, weights_only=True)
        if saved["settings"] != settings:
            raise InputError(f"{place} is of a run with other settings, {json.dumps(saved['settings'])}; remove it")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        begun = saved["step"]
    model.train()
    for step in range(begun, steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps, learning_rate)
        ids = batch(stream, rows, length, seed, step)
        loss = model(ids, labels=ids, output_router_logits=True, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 50 == 0 or step + 1 == steps:
            print(f"step {step + 1} of {steps}: loss {loss.item():.4f}")
        if (step + 1) % save_every == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            with files.replaced(place) as fresh:
                torch.save({**state, "settings": settings}, fresh)


def main(
    data: Annotated[Path, typer.Option(help="JSON lines with `text`, plain or gzipped, or a text file.")],
    out: Annotated[Path, typer.Option(help="Where target/ and the checkpoint are written.")],
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 6000,
    rows: Annotated[int, typer.Option(min=1, help="Rows of a step.")] = 16,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a row.")] = 256,
    learning_rate: Annotated[float, typer.Option(help="Highest rate of AdamW.")] = 2e-3,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 250,
    num_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of text to read.")] = 8_000_000,
    seed: Annotated[int, typer.Option(help="Of the weights and the batches.")] = 0,
) -> None:
    """Train the target and write it."""
    out.mkdir(parents=True, exist_ok=True)
    check_free(out / "target")
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_TARGET)
    stream = read_stream(data, tokenizer, num_tokens)
    model = mixtral(tokenizer, seed)
    count = sum(weight.numel() for weight in model.parameters())
    print(f"{len(stream) / 1e6:.2f} M tokens of text, {count:,} parameters")
    train(
        stream,
        model,
        out,
        steps=steps,
        rows=rows,
        length=length,
        learning_rate=learning_rate,
        save_every=save_every,
        seed=seed,
    )
    made = {"recipe": "moe_target", "data": str(data), "steps": steps, "rows": rows, "length": length, "seed": seed}
    write(model.eval(), tokenizer, out / "target", made)
    print(f"{out / 'target'}: written")
