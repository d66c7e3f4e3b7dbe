"""A pair that is loaded once, and the ways to decode that take turns with it on the same prompts with the same seeds.

A recipe names its ways to decode as data (`Method`). `outrider.bench.evidence` draws conclusions from the rows.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outrider import catalog
from outrider.assembly import assemble
from outrider.bench.evidence import Row
from outrider.bench.folder import Folder
from outrider.bench.side_by_side.configuration import Configuration
from outrider.bench.side_by_side.session import engine_of
from outrider.bench.turns import Turn, turns
from outrider.bench.workloads.workload import PROMPTS
from outrider.core.progress import task
from outrider.core.types import InputError
from outrider.drafters.model import ModelPath
from outrider.embedded import EMBEDDED_DRAFT
from outrider.engine.engine import Engine
from outrider.host.threads import use_threads
from outrider.lengths.fixed import FixedLength
from outrider.plan.tree_coverage import Branches, DraftedTree, SharedPaths
from outrider.setup import Setup
from outrider.theory.coverage import Rule
from outrider.trees.gumbel import GumbelTree
from outrider.trees.iid import IidTree
from recipes import options
from recipes.inquiry.counts import FixedChain, listen, rows_of, rows_told
from recipes.inquiry.texts import RecordedText
from recipes.questions import Question, questions
from recipes.runs import Conditions, PromptBatch, as_row, on_engine


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the recipes on a pair are told.

    Attributes:
        out: Folder for the results; None keeps them in memory.
        target: Directory or hub id; None is the embedded target.
        seeds: How many seeds each prompt is run with.
        max_new_tokens: Most tokens per request.
        dtype: What the models compute in; `auto` is the weights' own.
        as_is: Count no further steps; judge by the prompts that all methods have done in the folder `out`.
    """

    out: options.Out = None
    target: options.Target = None
    draft: options.Draft = EMBEDDED_DRAFT
    prompts: options.Prompts = PROMPTS
    num_prompts: options.NumPrompts = 20
    seeds: options.Seeds = 1
    max_new_tokens: options.MaxNewTokens = 64
    threads: options.Threads = 2
    dtype: options.Dtype = "auto"
    as_is: options.AsIs = False

    def __post_init__(self) -> None:
        for name in ("num_prompts", "seeds", "max_new_tokens", "threads"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be >= 1, got {getattr(self, name)}")
        if not ((self.draft / "config.json").is_file() or (self.draft.suffix == ".gguf" and self.draft.is_file())):
            raise InputError(f"{self.draft} is not a model's directory: it has no config.json, and is no GGUF file")

    @property
    def about(self) -> str:
        """What is measured on, for people."""
        return (
            f"Target `{self.target or 'embedded'}`, draft model `{self.draft.name}`, prompts: {self.num_prompts}, "
            f"seeds: {self.seeds}, tokens: at most {self.max_new_tokens}. Intervals: 95 %, bootstrap over prompts "
            "within their categories, paired between methods."
        )


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to decode, as the catalog writes it.

    Attributes:
        name: Unique within a recipe.
        deepest: Deepest draft of all that it is compared with. Block efficiency is taken over the steps that begin
            with room for it, so that the end of a request cuts no draft.
        decoding: In which order to draft and verify; `plain` drafts nothing and pads nothing.
        threads: Threads of torch; None is the setting's.
        labels: What the rows say of it besides.
        control: Length of a chain that takes about as many steps for a text as the method does.
    """

    name: str
    tree: str = "chain"
    verifier: str = "block"
    length: str = "fixed:5"
    temperature: float = 1.0
    deepest: int = 8
    decoding: str = "step"
    threads: int | None = None
    labels: Mapping[str, str | int | float] = field(default_factory=dict)

    control: int = 5

    @property
    def chain(self) -> FixedChain | None:
        """The chain of a fixed length that it is, if it is one whose steps texts alone can tell."""
        length = catalog.make("length", self.length)
        if (self.tree, self.decoding) != ("chain", "step") or not isinstance(length, FixedLength):
            return None
        if self.verifier not in ("token", "block"):
            return None
        rule: Rule = "token" if self.verifier == "token" else "block"
        return FixedChain(rule=rule, length=length.num_speculative_tokens, deepest=self.deepest)

    @property
    def told(self) -> DraftedTree | None:
        """The trees that it drafts, if texts alone tell how many steps they take."""
        tree, length = catalog.make("tree", self.tree), catalog.make("length", self.length)
        if self.decoding != "step" or self.temperature == 0 or not isinstance(length, FixedLength):
            return None
        depth = length.num_speculative_tokens
        if isinstance(tree, GumbelTree) and self.verifier == "recursive":
            return Branches(counts=tree.branching[:depth])
        if isinstance(tree, IidTree) and not tree.dedup and self.verifier in ("recursive", "kseq"):
            return SharedPaths(
                count=tree.num_paths, depth=depth, rule="kseq" if self.verifier == "kseq" else "recursive"
            )
        return None

    @property
    def repeats(self) -> bool:
        """Whether every seed gives the same run: nothing is drawn."""
        tree: Any = catalog.make("tree", self.tree)
        return self.temperature == 0 and tree.structure in ("chain", "deterministic")

    @property
    def held_against(self) -> FixedChain:
        """The chain that its steps are compared with, text by text."""
        return FixedChain(rule="block", length=min(self.control, self.deepest), deepest=self.deepest)

    @property
    def parts(self) -> dict[str, str]:
        """Its parts by family."""
        return {name: getattr(self, name) for name in ("tree", "verifier", "length", "decoding")}


class Bench:
    """A pair, loaded once, in as many engines as there are methods; they take turns and share the models' slots."""

    def __init__(self, setting: Setting, *, max_slots: int = 1, ignore_eos: bool = False) -> None:
        use_threads(setting.threads)
        self.setting, self.max_slots, self.ignore_eos = setting, max_slots, ignore_eos
        drafter = ModelPath(path=str(setting.draft))
        self._setup = Setup(setting.target, drafter=drafter, max_slots=max_slots, dtype=setting.dtype)
        self.first = assemble(self._setup)
        self._engines: dict[tuple[str, ...], Engine] = {}
        self._heard: tuple[tuple[str, float], list[RecordedText]] | None = None

    def engine(self, method: Method) -> Engine:
        """The engine of a method."""
        if method.decoding == "plain":
            return self.first.plain()
        key = tuple(method.parts.values())
        if key not in self._engines:
            self._engines[key] = engine_of(
                self._setup, Configuration(name=method.name, options=method.parts), self.first
            )
        return self._engines[key]

    def questions(self, count: int, without: Sequence[Question] = ()) -> list[Question]:
        """As many prompts of every category as of any other, from those that leave room for the output."""
        return questions(
            self.setting.prompts,
            count,
            encode=self.first.encode,
            longest=self.first.parts.target.max_context - self.setting.max_new_tokens,
            without=without,
        )

    def jobs(self, questions: Sequence[Question]) -> list[PromptBatch]:
        """Every prompt by itself, with every seed."""
        return [PromptBatch(questions=(q,), seed=seed) for seed in range(self.setting.seeds) for q in questions]

    def conditions(self, method: Method, max_new_tokens: int | None = None) -> Conditions:
        """How a method does its jobs."""
        return Conditions(
            max_new_tokens=max_new_tokens or self.setting.max_new_tokens,
            temperature=method.temperature,
            ignore_eos=self.ignore_eos,
        )

    def run(self, method: Method, job: PromptBatch, max_new_tokens: int | None = None) -> Row:
        """One run, from a cold cache to the last token, as a line of `rows.jsonl`."""
        engine, conditions = self.engine(method), self.conditions(method, max_new_tokens)
        use_threads(method.threads or self.setting.threads)
        made = on_engine(engine, job, conditions, columns=1 if method.decoding == "plain" else None)
        labels = {**method.parts, **method.labels}
        return as_row(made, method.name, job, conditions, deepest=method.deepest, labels=labels)

    def measure(self, folder: Folder, phase: str, methods: Sequence[Method], jobs: Sequence[PromptBatch]) -> list[Row]:
        """All methods on all jobs, in turns; a row per run."""
        self.check(methods)
        todo = list(turns(methods, jobs, seed=phase))
        short = PromptBatch(questions=tuple(replace(q, tokens=q.tokens[:8]) for q in jobs[0].questions))
        with task(f"{phase}: warm-up", len(methods)) as warm:
            for method in methods:
                self.run(method, short, max_new_tokens=8)
                warm.advance()

        def run(turn: Turn[Method, PromptBatch]) -> Row:
            return self.run(turn.way, turn.job)

        return folder.take(phase, todo, run)

    def count(
        self,
        folder: Folder,
        methods: Sequence[Method],
        jobs: Sequence[PromptBatch],
        *,
        compared: Sequence[Method] = (),
        phase: str = "counted",
    ) -> list[Row]:
        """The steps of methods on all jobs; those of chains of a fixed length are read off the texts of the others.

        Trees whose steps texts alone tell are not run either: the target says a text for all of them.

        A row is a method's run of a job: its `each` has the counts of every request, and for every chain that is
        compared the steps that it would take for the request's text.

        Args:
            compared: All methods that the rows will be compared with; by default these.
        """
        self.check(methods)
        run = [method for method in methods if method.chain is None]
        for temperature in sorted({method.temperature for method in methods} - {method.temperature for method in run}):
            # Somebody must say the texts; the longest chain says them in the fewest steps.
            own = [method for method in methods if method.temperature == temperature]
            run.append(max(own, key=lambda method: method.chain.length if method.chain else 0))
        chains: dict[float, dict[str, FixedChain]] = {}
        for method in compared or methods:
            for chain in (method.chain, method.held_against):
                if chain is not None:
                    chains.setdefault(method.temperature, {})[chain.name] = chain

        def counted(turn: Turn[Method, PromptBatch]) -> Row:
            method, job, began = turn.way, turn.job, time.perf_counter()
            conditions, own = self.conditions(method), list(chains[method.temperature].values())
            if method.told is None:
                each = rows_of(self.engine(method), job, conditions, deepest=method.deepest, chains=own)
            else:
                texts = self._texts(job, conditions)
                each = rows_told(texts, job, conditions, method.told, deepest=method.deepest, chains=own)
            labels = {**method.parts, **method.labels, "temperature": method.temperature, "seed": job.seed}
            return {"method": method.name, **labels, "seconds": time.perf_counter() - began, "each": each}

        todo = turns(run, jobs, seed=f"{phase}, seed {jobs[0].seed}")
        rows = folder.take(phase, todo, counted, as_is=self.setting.as_is)
        return whole_jobs(rows, len(run)) if self.setting.as_is else rows

    def _texts(self, job: PromptBatch, conditions: Conditions) -> list[RecordedText]:
        """What the target says; kept for the methods that take the next turns on the job."""
        key = job.name, conditions.temperature
        if self._heard is None or self._heard[0] != key:
            self._heard = key, listen(self.first, job, conditions)
        return self._heard[1]

    def batches(self, questions: Sequence[Question], size: int | None = None) -> list[PromptBatch]:
        """Prompts in batches as large as there are slots, with every seed."""
        count = size or self.max_slots
        return [
            PromptBatch(questions=tuple(questions[first : first + count]), seed=seed)
            for seed in range(self.setting.seeds)
            for first in range(0, len(questions), count)
        ]

    def check(self, methods: Sequence[Method]) -> None:
        """Raises InputError where outputs are too short for what the methods draft."""
        for method in methods:
            if method.deepest >= self.setting.max_new_tokens:
                raise InputError(
                    f"max_new_tokens must be > {method.deepest}, the deepest draft, got {self.setting.max_new_tokens}"
                )


def whole_jobs(rows: Sequence[Row], num_methods: int) -> list[Row]:
    """The rows of the jobs that all methods have done."""
    jobs: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        jobs.setdefault((row["seed"], *(each["prompt"] for each in row["each"])), []).append(row)
    return [row for own in jobs.values() if len(own) == num_methods for row in own]
