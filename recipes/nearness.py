r"""How near the logits of each engine are to the float32 model of the same GGUF file, over a text.

`python -m recipes nearness --target FILE.gguf --environments DIR` reads the same token ids in each engine, and compares
the law of each next token with that of the dequantised model in float32. With $p$ of that model and $q$ of the engine,
over the engine's likeliest tokens $T$:

$$p(T) \sum_{x \in T} p(x \mid T) \log \frac{p(x \mid T)}{q(x \mid T)} \le \mathrm{KL}(p \| q)$$

So the figures are lower bounds, which differ from the divergence by what happens among the unlikely tokens and between
these and the likely ones. The latter is left out because ik_llama.cpp's server tells probabilities that are too small,
those of a position all by the same factor (0.54 to 0.97 in a text). Servers are asked behind each token, one token at
a time, as they decode.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

import outrider
from outrider.bench.engines import ik_llama, llama
from outrider.bench.engines.driver import Options
from outrider.bench.engines.server import ServerDriver, cannot_tell
from outrider.bench.evidence import Row
from outrider.bench.folder import folder
from outrider.bench.report import Findings, Table
from outrider.bench.side_by_side.peers import usual_folder
from outrider.core.progress import task
from outrider.core.types import InputError
from outrider.lm.hf.open import open_model, open_tokenizer
from recipes import options

TEXTS = sorted((Path(__file__).parents[1] / "docs" / "guide").glob("*.md"))
"""What is read by default."""
SERVERS = {"llama": (llama, ServerDriver), "ik_llama": (ik_llama, ik_llama.IkLlamaDriver)}
QUICK = {"engines": "outrider", "positions": 40, "window": 21, "top": 20}
Law = Mapping[int, float]
"""Log-probabilities of the likeliest next tokens."""


def divergence(reference: Tensor, law: Law) -> float:
    """The lower bound of the divergence of one position.

    Args:
        reference: Log-probabilities of all tokens, of the float32 model.

    Example:
        >>> row = torch.tensor([0.5, 0.25, 0.25]).log()
        >>> round(divergence(row, {0: math.log(0.4), 1: math.log(0.2)}), 6)
        0.0
        >>> told = 0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3)
        >>> round(divergence(row, {0: math.log(0.25), 1: math.log(0.25)}), 6) == round(told, 6)
        True
    """
    p = {token: float(reference[token]) for token in law}
    told = sum(math.exp(p[token]) * (p[token] - law[token]) for token in law)
    mass, theirs = (sum(map(math.exp, each.values())) for each in (p, law))
    return told - mass * math.log(mass / theirs)


@contextmanager
def serving(driver: ServerDriver, mode: str, target: Path, threads: int, context: int) -> Iterator[None]:
    """In the body, a server runs a file alone, for one request at a time."""
    driver.start(
        Options(
            mode=mode,
            target=str(target),
            draft="",
            dtype="",
            threads=threads,
            draft_tokens=0,
            ngram=0,
            batch=1,
            context=context,
        )
    )
    try:
        yield
    finally:
        driver.stop()


def by_server(name: str, target: Path, server: Path, windows: Sequence[list[int]], top: int, threads: int) -> Row:
    """The laws behind each token of some texts, by a server."""
    module, driver_of = SERVERS[name]
    driver = driver_of(server, module.FLAGS)
    with serving(driver, "plain", target, threads, max(map(len, windows)) + 64):
        laws = [likeliest(driver, tokens[:i], top) for tokens in windows for i in range(1, len(tokens))]
    return {"engine": module.ENGINE.title, "laws": laws}


def likeliest(driver: ServerDriver, tokens: Sequence[int], top: int) -> Law | None:
    """The law behind some tokens; None where a server cannot tell one of the likeliest tokens, as llama.cpp's."""
    try:
        return driver.likeliest(tokens, top)
    except ValueError as error:
        if not cannot_tell(error):
            raise
        return None


def by_outrider(target: Path, windows: Sequence[list[int]], top: int) -> Row:
    """The same by Outrider, as it opens the file by default."""
    engine = outrider.load(str(target), drafter="none", probe=False)
    laws: list[Law] = []
    for tokens in windows:
        [output] = engine.generate([tokens], max_new_tokens=0, prompt_logprobs=top)
        assert output.prompt_logprobs is not None
        laws += [each for each in output.prompt_logprobs.top if each is not None]
    dtype = str(engine.parts.target.dtype).removeprefix("torch.")
    return {"engine": f"Outrider, {dtype}", "laws": laws}


@torch.inference_mode()
def references(target: Path, windows: Sequence[list[int]]) -> Iterator[Tensor]:
    """Log-probabilities of the dequantised model in float32, behind each token of the texts but the last."""
    model = open_model(str(target), dtype="float32")
    for tokens in windows:
        yield from torch.log_softmax(model(torch.tensor([tokens])).logits[0, :-1].double(), dim=-1)


def findings(rows: Sequence[Row], target: Path) -> Findings:
    """A line for each engine."""
    lines = [
        [row["engine"], f"{row['divergence']:.2e}", f"{row['median']:.2e}", f"{row['same']:.1%}", f"{row['mass']:.3f}"]
        for row in rows
    ]
    head = ("engine", "mean divergence", "median", "same likeliest token", "probability among the compared tokens")
    text = f"{target.name}, {rows[0]['positions']} positions that all engines told." if rows else ""
    return Findings(tables=[Table(head=head, lines=lines)], text=text)


def main(
    target: Annotated[Path, typer.Option(help="GGUF file.")],
    out: options.Out = None,
    engines: Annotated[
        str, typer.Option(help="Of outrider, llama, ik_llama, with commas.")
    ] = "outrider,llama,ik_llama",
    environments: Annotated[
        Path, typer.Option(help="Folder of the engines' environments.", show_default=False)
    ] = usual_folder(),  # noqa: B008
    positions: Annotated[int, typer.Option(min=1, help="Positions that are compared.")] = 2000,
    window: Annotated[int, typer.Option(min=2, help="Tokens of each text.")] = 501,
    top: Annotated[int, typer.Option(min=1, help="Likeliest tokens that are compared one by one.")] = 100,
    threads: options.Threads = 2,
) -> None:
    """Compare the logits of engines with those of the float32 model."""
    torch.set_num_threads(threads)
    wanted = options.words(engines)
    if unknown := [name for name in wanted if name not in ("outrider", *SERVERS)]:
        raise InputError(f"unknown engine {unknown[0]!r}; available: outrider, {', '.join(SERVERS)}")
    text = "\n\n".join(file.read_text(encoding="utf-8") for file in TEXTS)
    if (tokenizer := open_tokenizer(str(target))) is None:
        raise InputError(f"{target} has no tokenizer")
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    windows = [ids[i * window : (i + 1) * window] for i in range(-(-positions // (window - 1)))]
    with folder(
        out, "nearness", {"target": str(target), "positions": positions, "window": window, "top": top}
    ) as place:
        found = []
        with task("engines", len(wanted), "engines") as bar:
            for name in wanted:
                if name == "outrider":
                    found.append(by_outrider(target, windows, top))
                else:
                    module, _ = SERVERS[name]
                    room = module.ENGINE.environment.ready(environments)
                    found.append(by_server(name, target, module.server_of(room), windows, top, threads))
                bar.advance()
        sums: list[list[tuple[float, bool, float]]] = [[] for _ in found]
        for i, reference in zip(range(positions), references(target, windows), strict=False):
            if any(row["laws"][i] is None for row in found):
                continue
            for row, own in zip(found, sums, strict=True):
                law = row["laws"][i]
                same = max(law, key=law.__getitem__) == int(reference.argmax())
                own.append((divergence(reference, law), same, sum(map(math.exp, law.values()))))
        rows: list[Row] = []
        for row, own in zip(found, sums, strict=True):
            values = torch.tensor(own, dtype=torch.float64)
            mean = values.mean(0).tolist()
            rows.append(
                {
                    "phase": "engines",
                    "turn": row["engine"],
                    "engine": row["engine"],
                    "positions": len(own),
                    "divergence": mean[0],
                    "median": float(values[:, 0].median()),
                    "same": mean[1],
                    "mass": mean[2],
                }
            )
            place.add(rows[-1])
        place.finish(findings(rows, target))
