"""Make the embedded pair again from text: train the target, let it generate text, distil the draft model from it.

The text is JSON lines with `domain` and `text`, plain or gzipped. Each part is a function that returns what it made;
`python -m recipes embedded_pair` runs the parts one after another, with checkpoints, on a CPU.

The draft model is wide and shallow, because a draft costs its depth (Yan et al. 2024,
https://arxiv.org/abs/2402.01528).
It is trained on the text and on the target's own outputs (Zhou et al. 2023, DistillSpec,
https://arxiv.org/abs/2310.08461), with the hybrid of forward KL and total variation whose weight moves to total
variation as acceptance grows (LK losses, https://arxiv.org/abs/2602.23881).
"""

import gzip
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from jaxtyping import Float, Int
from rich import print
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from outrider.core import files
from outrider.embedded import EMBEDDED_TARGET
from recipes.trained import shape

REPEATS = {"story": 3, "math": 3}
"""How often the documents of a domain are repeated; short stories and word problems teach most per token."""

TARGET_SHAPE = shape(12, 320, 896)
QUICK = {"target_minutes": 0.02, "speak_minutes": 0.02, "distil_minutes": 0.02, "shapes": "1x128"}
DRAFT_SHAPES = {"1x128": shape(1, 128, 384), "1x256": shape(1, 256, 768), "2x192": shape(2, 192, 768)}


def read_tokens(
    path: Path, tokenizer: PreTrainedTokenizerBase, repeats: dict[str, int] = REPEATS, seed: int = 0
) -> Int[Tensor, " tokens"]:
    """All documents as one shuffled stream of token ids, each document after an end token."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        documents = [json.loads(line) for line in lines]
    texts = [d["text"] for d in documents for _ in range(repeats.get(d["domain"], 1) if len(d["text"]) < 4000 else 1)]
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
    end = tokenizer.eos_token_id
    encoded = tokenizer([texts[i] for i in order], add_special_tokens=False)["input_ids"]
    return torch.tensor([token for document in encoded for token in (end, *document)], dtype=torch.int32)


def llama(tokenizer: PreTrainedTokenizerBase, **shape: int) -> LlamaForCausalLM:
    """A fresh Llama with tied embeddings over the tokenizer's vocabulary."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        rms_norm_eps=1e-6,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **shape,
    )
    return LlamaForCausalLM(config)


def inherit_embeddings(draft: PreTrainedModel, target: PreTrainedModel) -> None:
    """Start the draft's embeddings at the leading principal directions of the target's."""
    table = target.get_input_embeddings().weight.detach().float()
    directions = torch.linalg.svd(table - table.mean(0), full_matrices=False).Vh[: draft.config.hidden_size]
    projected = table @ directions.T
    with torch.no_grad():
        draft.get_input_embeddings().weight.copy_(projected / projected.std() * 0.05)


def hybrid_loss(
    target_logits: Float[Tensor, "n vocab"], draft_logits: Float[Tensor, "n vocab"]
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    r"""$\lambda\,KL(p\|q) + (1-\lambda)\,TV(p,q)$ with $\lambda = e^{-3\alpha}$ per token; and the mean $\alpha$."""
    log_p, log_q = target_logits.log_softmax(-1), draft_logits.log_softmax(-1)
    p = log_p.exp()
    tv = 0.5 * (p - log_q.exp()).abs().sum(-1)
    kl = (p * (log_p - log_q)).sum(-1)
    weight = torch.exp(-3 * (1 - tv.detach()))
    return (weight * kl + (1 - weight) * tv).mean(), 1 - tv.detach().mean()


def optimizers(model: PreTrainedModel) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for everything else."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        torch.optim.Muon(matrices, lr=3e-3, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def windows(
    tokens: Int[Tensor, " tokens"], batch: int, length: int, seed: int
) -> Iterator[Int[Tensor, "batch length"]]:
    """Endless batches of random windows."""
    dice = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(tokens) - length, (batch,), generator=dice)
        yield torch.stack([tokens[s : s + length] for s in starts.tolist()]).long()


def train(
    models: dict[str, PreTrainedModel],
    losses: Callable[[int, dict[str, PreTrainedModel]], dict[str, tuple[Tensor, Tensor]]],
    minutes: float,
    out: Path,
) -> None:
    """Step every model on its own loss until the time is over. The learning rate rises linearly in the warm-up and then
    falls as a cosine to a twentieth.

    `losses(step, models)` gives for each model its loss and one figure to print. Checkpoints go to `out/NAME` every ten
    minutes; each is written under a temporary name and renamed.
    """
    optimisers = {name: optimizers(model.train()) for name, model in models.items()}
    base = {name: [group["lr"] for o in each for group in o.param_groups] for name, each in optimisers.items()}
    began = saved = time.monotonic()
    step, means = 0, dict.fromkeys(models, 0.0)
    while (done := (time.monotonic() - began) / (60 * minutes)) < 1:
        rate = min(1, (step + 1) / 100) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))
        for name, (loss, figure) in losses(step, models).items():
            loss.backward()
            torch.nn.utils.clip_grad_norm_(models[name].parameters(), 1.0)
            groups = [group for o in optimisers[name] for group in o.param_groups]
            for group, lr in zip(groups, base[name], strict=True):
                group["lr"] = lr * rate
            for o in optimisers[name]:
                o.step()
                o.zero_grad(set_to_none=True)
            means[name] += (figure.item() - means[name]) * max(0.02, 1 / (step + 1))
        step += 1
        if step % 50 == 0:
            print(f"step {step}, {done:.1%}: " + ", ".join(f"{n} {m:.4f}" for n, m in means.items()))
        if time.monotonic() - saved > 600:
            save(models, out)
            saved = time.monotonic()
    save(models, out)


def save(models: dict[str, PreTrainedModel], out: Path) -> None:
    """Write every model in bfloat16 under a temporary name, then rename."""
    for name, model in models.items():
        copy = LlamaForCausalLM(model.config).to(torch.bfloat16)
        copy.load_state_dict(model.state_dict())
        place = out / name
        with files.replaced(place) as fresh:
            copy.save_pretrained(fresh)
            if place.exists():
                place.rename(out / f"{name}.{time.time_ns()}")


def train_target(tokens: Int[Tensor, " tokens"], tokenizer: PreTrainedTokenizerBase, minutes: float, out: Path) -> None:
    """Train the target from random weights on next-token cross-entropy; the printed figure is the loss in nats per
    token.
    """
    stream = windows(tokens, batch=16, length=513, seed=1)

    def losses(step: int, models: dict[str, PreTrainedModel]) -> dict[str, tuple[Tensor, Tensor]]:
        ids = next(stream)
        with torch.autocast("cpu", torch.bfloat16):
            logits = models["target"](ids[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        return {"target": (loss, loss.detach())}

    train({"target": llama(tokenizer, **TARGET_SHAPE)}, losses, minutes, out)


@torch.inference_mode()
def speak(
    target: PreTrainedModel, tokens: Int[Tensor, " tokens"], minutes: float, out: Path, batch: int = 128
) -> Int[Tensor, "rows 256"]:
    """The target's continuations of openings of the text, a third of them greedy. They are saved while they grow."""
    rows: list[Tensor] = []
    began = time.monotonic()
    starts = (tokens == target.config.eos_token_id).nonzero().squeeze(1)
    starts = starts[starts < len(tokens) - 256]
    dice = torch.Generator().manual_seed(2)
    round_ = 0
    while time.monotonic() - began < 60 * minutes:
        length = (24, 48, 96)[round_ % 3]
        chosen = starts[torch.randint(0, len(starts), (batch,), generator=dice)]
        prompts = torch.stack([tokens[s : s + length] for s in chosen.tolist()]).long()
        torch.manual_seed(round_)
        said = target.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=round_ // 3 % 3 != 0,
            temperature=1.0,
            top_k=0,
            max_new_tokens=256 - length,
            eos_token_id=-1,
        )
        rows.append(said.int())
        round_ += 1
        with files.replaced(out) as fresh:
            torch.save(torch.cat(rows), fresh)
        print(f"{sum(len(r) for r in rows) * 256 / 1e6:.2f} M tokens spoken")
    return torch.cat(rows)


def distil(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tokens: Int[Tensor, " tokens"],
    spoken: Int[Tensor, "rows 256"],
    shapes: dict[str, dict[str, int]],
    minutes: float,
    out: Path,
    batch: int = 16,
) -> None:
    """Distil draft models of several shapes at once, half on the text and half on the target's own outputs.

    One forward of the target teaches all of them. The printed figure is the mean acceptance $1 - TV(p, q)$.
    """
    drafts = {name: llama(tokenizer, **shape) for name, shape in shapes.items()}
    for draft in drafts.values():
        inherit_embeddings(draft, target)
    text = windows(tokens, batch=batch // 2, length=256, seed=3)
    loss = torch.compile(hybrid_loss)
    dice = torch.Generator().manual_seed(4)

    def losses(step: int, models: dict[str, PreTrainedModel]) -> dict[str, tuple[Tensor, Tensor]]:
        own = spoken[torch.randint(0, len(spoken), (batch - batch // 2,), generator=dice)].long()
        ids = torch.cat([next(text), own])
        with torch.no_grad():
            target_logits = target(ids, use_cache=False).logits.flatten(0, 1).float()
        result = {}
        for name, draft in models.items():
            with torch.autocast("cpu", torch.bfloat16):
                draft_logits = draft(ids, use_cache=False).logits.flatten(0, 1)
            result[name] = loss(target_logits, draft_logits.float())
        return result

    train(drafts, losses, minutes, out)


def main(
    text: Annotated[Path, typer.Option(help="JSON lines with `domain` and `text`, plain or gzipped.")],
    out: Annotated[Path, typer.Option(help="Where target/, spoken.pt and the draft models are written.")],
    tokenizer: Annotated[
        Path, typer.Option(help="Directory with the tokenizer, or with target and tokenizer.")
    ] = EMBEDDED_TARGET,
    target_minutes: Annotated[float, typer.Option(help="Train the target this long; 0 takes it from --tokenizer.")] = 0,
    speak_minutes: Annotated[float, typer.Option(help="Let the target speak this long; 0 takes spoken.pt.")] = 15,
    distil_minutes: Annotated[float, typer.Option(help="Distil the draft models this long.")] = 60,
    shapes: Annotated[str, typer.Option(help=f"Which of {', '.join(DRAFT_SHAPES)} to make.")] = "1x256",
) -> None:
    """Run the parts in order."""
    out.mkdir(parents=True, exist_ok=True)
    vocabulary = AutoTokenizer.from_pretrained(tokenizer)
    tokens = read_tokens(text, vocabulary)
    print(f"{len(tokens) / 1e6:.1f} M tokens of text")
    if target_minutes:
        train_target(tokens, vocabulary, target_minutes, out)
    place = out / "target" if target_minutes else tokenizer
    target = AutoModelForCausalLM.from_pretrained(place, dtype=torch.bfloat16).eval()
    spoken = speak(target, tokens, speak_minutes, out / "spoken.pt") if speak_minutes else torch.load(out / "spoken.pt")
    chosen = {name: DRAFT_SHAPES[name] for name in shapes.split(",")}
    distil(target, vocabulary, tokens, spoken, chosen, distil_minutes, out)
