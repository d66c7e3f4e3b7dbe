"""What a forward of a few tokens takes behind short and long contexts, in each engine that reads the same GGUF file.

`python -m recipes forwards --target FILE.gguf --environments DIR` reads a periodic text in every engine. Then each
engine's target reads 1, 5 and 8 more tokens behind it, as it does to verify drafts, in turns with the others. Outrider
makes its own steps; servers keep the text in their caches, are asked with other tokens behind it, and tell how long
these took. It wants a quiet machine.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import outrider
from outrider.bench.engines import ik_llama, llama
from outrider.bench.engines.driver import DriverRequest
from outrider.bench.engines.server import ServerDriver, cannot_tell
from outrider.bench.evidence import Row
from outrider.bench.folder import folder
from outrider.bench.report import Findings, Table
from outrider.bench.side_by_side.peers import usual_folder
from outrider.bench.turns import Turn, turns
from outrider.core.progress import task
from outrider.core.types import InputError
from outrider.plan.probe import StepProbe, StepShape
from recipes import options
from recipes.label import Label
from recipes.nearness import serving
from recipes.quartiles import quartiles, spread

OURS = "outrider"
SERVERS = {"llama": (llama, "plain"), "ik_llama": (ik_llama, "plain"), "ik_llama -rtr": (ik_llama, "plain -rtr")}
"""Engines with servers, and the mode that they are started in."""
ENGINES = (OURS, *SERVERS)
IDS = 2003
"""Ids of tokens that servers read; every vocabulary has them."""
TRIES = 4
"""How often a server is asked: it reads the text first. By chance it has said one of the tokens itself, or cannot tell
the one that it says."""
QUICK = {"engines": OURS, "contexts": "32,64", "tokens": "1,3", "rounds": 1}
Forward = Callable[[int, int], float]
"""Seconds of a forward of so many tokens behind so many."""


class ServedForwards:
    """Forwards of a server that was started, as it tells their time."""

    def __init__(self, driver: ServerDriver) -> None:
        self._driver, self._asked = driver, 0

    def __call__(self, tokens: int, context: int) -> float:
        """Seconds of a forward.

        Raises:
            RuntimeError: It did not read so many tokens, but kept others than the text, or did not tell.
        """
        why = ""
        for _ in range(TRIES):
            self._asked += 1
            others = periodic(tokens + self._asked)[-tokens:]
            try:
                timings = self._read([*periodic(context), *others])
            except ValueError as error:
                if not cannot_tell(error):
                    raise
                why = str(error)
                continue
            if timings["prompt_n"] == tokens:
                return float(timings["prompt_ms"]) / 1000
            why = f"the server read {timings['prompt_n']} tokens instead of {tokens}"
        raise RuntimeError(why)

    def _read(self, prompt: list[int]) -> Any:
        """What it tells of the time that it took to read what it had not read."""
        asked = DriverRequest(prompts=[prompt], new_tokens=1, temperature=0.0, seed=0)
        body = self._driver.body(asked, 0) | {"n_predict": 1, "cache_prompt": True}
        return self._driver.call("POST", self._driver.path, body)["timings"]


def periodic(count: int) -> list[int]:
    """A text of so many tokens, in which no two neighbours are the same."""
    return [(place * 7919 + 11) % IDS for place in range(count)]


@contextmanager
def forwards(name: str, target: Path, environments: Path, contexts: Sequence[int], threads: int) -> Iterator[Forward]:
    """The forwards of an engine."""
    room = 2 * max(contexts) + 64
    if name == OURS:
        engine = outrider.load(
            str(target), drafter="ngram", max_slots=len(contexts), max_context=room, probe=False, threads=threads
        )
        probes = {context: StepProbe(engine.parts, context) for context in contexts}

        def forward(tokens: int, context: int) -> float:
            cost = probes[context].step(StepShape(requests=1, length=tokens - 1))
            if cost is None:
                raise RuntimeError(f"there was no draft of {tokens - 1} tokens")
            return cost.target

        yield forward
        for probe in probes.values():
            probe.close()
        return
    module, mode = SERVERS[name]
    driver = ServerDriver(module.server_of(module.ENGINE.environment.ready(environments)), module.FLAGS)
    with serving(driver, mode, target, threads, room):
        yield ServedForwards(driver)


def findings(rows: Sequence[Row], contexts: Sequence[int], tokens: Sequence[int]) -> Findings:
    """A line for each engine and context."""
    lines, found, names = [], [], list(dict.fromkeys(row["way"] for row in rows))
    for context in contexts:
        for name in names:
            seconds = {
                count: [
                    row["seconds"] for row in rows if (row["way"], row["job"]) == (name, f"{count} behind {context}")
                ]
                for count in tokens
            }
            times = {count: spread(each) for count, each in seconds.items()}
            ratios = [f"{times[count]['median'] / times[tokens[0]]['median']:.2f}" for count in tokens[1:]]
            lines.append([name, context, *(quartiles(each, ".1f", 1e3) for each in times.values()), *ratios])
            found.append({"engine": name, "context": context, "seconds": times})
    head = ("engine", "behind", *(f"{n}, ms" for n in tokens), *(f"{n} over {tokens[0]}" for n in tokens[1:]))
    text = f"Forwards of {', '.join(map(str, tokens))} tokens in turns: median and quartiles of the rounds."
    return Findings(tables=[Table(head=head, lines=lines)], text=text, summary={"forwards": found})


def main(
    target: Annotated[Path, typer.Option(help="GGUF file.")],
    out: options.Out = None,
    engines: Annotated[str, typer.Option(help=f"Of {', '.join(ENGINES)}, with commas.")] = ",".join(ENGINES),
    environments: Annotated[
        Path, typer.Option(help="Folder of the engines' environments.", show_default=False)
    ] = usual_folder(),  # noqa: B008
    contexts: Annotated[str, typer.Option(help="Tokens before, with commas.")] = "100,4000",
    tokens: Annotated[str, typer.Option(help="Tokens of a forward, with commas.")] = "1,5,8",
    threads: options.Threads = 2,
    rounds: options.Rounds = 15,
) -> None:
    """Time forwards of a few tokens."""
    torch.set_num_threads(threads)
    wanted = options.words(engines, "--engines", ENGINES)
    counts, lengths = options.whole_numbers("--tokens", tokens), options.whole_numbers("--contexts", contexts)
    if not target.is_file():
        raise InputError(f"there is no file {target}; give a GGUF file")
    circumstances = {"target": target.name, "engines": engines, "contexts": contexts, "tokens": tokens}
    with folder(out, "forwards", circumstances | {"threads": threads}) as place, ExitStack() as stack:
        own = {name: stack.enter_context(forwards(name, target, environments, lengths, threads)) for name in wanted}

        def one(turn: Turn[Label, Label]) -> Row:
            seconds = own[turn.way.name](*turn.job.value)
            return {"way": turn.way.name, "job": turn.job.name, "seconds": seconds}

        rows = []
        for context in lengths:
            jobs = [Label(name=f"{count} behind {context}", value=(count, context)) for count in counts]
            # A server that is asked for another context reads all of it again.
            with task(f"reading {context} tokens", len(wanted), "engines") as bar:
                for name in wanted:
                    own[name](counts[0], context)
                    bar.advance()
            rows += place.take(f"behind {context}", turns(Label.each(wanted), jobs, rounds=rounds), one)
        place.finish(findings(rows, lengths, counts))
