"""Records a run: the target says texts alone, then each drafter guesses along them with the loop's own calls."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from outrider.core.sampling import to_rows
from outrider.core.texts import Before
from outrider.core.types import Frontier, Guess, InputError, Request, Running, Sampling, Step
from outrider.decoding.progress import begin, end, prefill
from outrider.decoding.protocol import Parts
from outrider.drafters.protocol import Drafter, Observed
from outrider.engine.engine import Engine
from outrider.engine.output import Output
from outrider.lengths.costs import CostTable, plain_seconds
from outrider.lengths.fixed import FixedLength
from outrider.lm.protocol import Segment
from outrider.plan.record import DraftRows, RecordedRun, TargetText
from outrider.plan.tree_coverage import Branches, DraftedTree, Ranked, SharedPaths, TopPlusOne
from outrider.trees.drawing import drafters_sampling

KINDS: Mapping[str, DraftedTree] = {
    "branches": Branches(counts=(2,)),
    "recursive": SharedPaths(count=2, depth=1, rule="recursive"),
    "kseq": SharedPaths(count=2, depth=1, rule="kseq"),
    "top_plus_one": TopPlusOne(width=2, depth=1),
    "ranks": Ranked(children=(1,)),
}
"""What is recorded for trees: what two draws tell, exactly, and the rank of the text's token."""
TREE_DEPTH = 4
"""Deepest level for which trees are recorded."""
FIRST_PROMPTS = 2
"""Prompts after which a recording within a time knows how long a prompt takes."""


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """A prompt, and what the target said after it.

    Attributes:
        prompt: Token ids.
        text: What was said.
    """

    prompt: tuple[int, ...]
    text: TargetText


def record(
    engine: Engine,
    drafters: Mapping[str, Drafter],
    prompts: Sequence[Sequence[int]],
    *,
    sampling: Sampling,
    max_new_tokens: int,
    depth: int = 8,
    costs: Sequence[CostTable] = (),
    draft_sampling: Sampling | None = None,
    max_seconds: float | None = None,
) -> RecordedRun:
    """Let the target answer prompts alone, and every drafter guess along the answers.

    Args:
        engine: The target is its target. All its slots must be free.
        drafters: Drafters for that target, by name.
        prompts: Token ids.
        sampling: How the texts are drawn.
        max_new_tokens: Longest text.
        depth: Deepest draft token that is recorded.
        costs: The costs of steps with each drafter, to which the run's plain steps are compared.
        draft_sampling: As in `along`.
        max_seconds: As many of the first prompts are recorded as this allows, at least two.

    Raises:
        InputError: No prompt got a text, or the settings depend on earlier tokens.
    """
    if sampling.reads_prefix:
        raise InputError("penalties and processors that read the text cannot be planned; leave them out")
    texts: list[TargetText] = []
    rows: dict[str, list[DraftRows]] = {name: [] for name in drafters}
    steps: list[Sequence[Step]] = []
    for some in _groups(len(prompts), engine.max_slots, max_seconds):
        outputs = plain_run(engine, [prompts[i] for i in some], sampling, max_new_tokens, first=some.start)
        steps += [output.steps for output in outputs]
        continuations = [
            Continuation(prompt=tuple(prompts[i]), text=_text(len(prompts[i]), output))
            for i, output in zip(some, outputs, strict=True)
            if output.tokens
        ]
        if not continuations:
            continue
        engine.rest()
        log_probs = [each.text.log_probs for each in continuations]
        for name, drafter in drafters.items():
            pairs = along(engine.parts, drafter, continuations, sampling, depth, draft_sampling=draft_sampling)
            log_probs = [log_p for log_p, _ in pairs]
            rows[name] += [each for _, each in pairs]
        texts += [replace(each.text, log_probs=p) for each, p in zip(continuations, log_probs, strict=True)]
    if not texts:
        raise InputError("the target said nothing to any prompt")
    drafts = {name: tuple(each) for name, each in rows.items()}
    run = RecordedRun(texts=tuple(texts), drafts=drafts, temperature=sampling.temperature)
    return replace(run, slowness=slowness_of(steps, costs, run) if costs else 1.0)


def _groups(count: int, most: int, max_seconds: float | None) -> Iterator[range]:
    """The prompts that are recorded together, until the time is over."""
    began, first = time.monotonic(), 0
    while first < count:
        room = most if max_seconds is None or first else FIRST_PROMPTS
        if max_seconds is not None and first:
            spent = time.monotonic() - began
            room = int((max_seconds - spent) / (spent / first))
        if room < 1:
            return
        some = range(first, min(count, first + min(room, most)))
        yield some
        first = some.stop


def _text(prompt: int, output: Output) -> TargetText:
    """What the target said, before anything is known of its probabilities."""
    return TargetText(
        prompt=prompt,
        tokens=np.array(output.tokens),
        log_probs=np.zeros(len(output.tokens)),
        ended=output.finish_reason != "length",
    )


def plain_run(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sampling, max_new_tokens: int, *, first: int = 0
) -> list[Output]:
    """What the target says alone; `first` is the number of the first prompt."""
    alone = engine.plain()
    seed = first + (0 if sampling.seed is None else sampling.seed)
    samplings = [replace(sampling, seed=seed + i) for i in range(len(prompts))]
    outputs = alone.generate([list(prompt) for prompt in prompts], max_new_tokens=max_new_tokens, sampling=samplings)
    alone.rest()
    return outputs


def slowness_of(outputs: Sequence[Sequence[Step]], costs: Sequence[CostTable], run: RecordedRun) -> float:
    """Seconds of the run's steps over those that the tables say. Sums are compared, as disturbed steps count too.

    Steps in which a request makes its first one are left out, because they may read a prompt.
    """
    sampled = run.temperature > 0
    first = {id(steps[0].timing) for steps in outputs if steps}
    later = {id(step.timing): step for steps in outputs for step in steps if id(step.timing) not in first}
    plain = [plain_seconds(costs, step.num_requests, sampled=sampled, context=run.context) for step in later.values()]
    return sum(step.timing.total for step in later.values()) / sum(plain) if plain else 1.0


@torch.inference_mode()
def along(
    parts: Parts,
    drafter: Drafter,
    continuations: Sequence[Continuation],
    sampling: Sampling,
    depth: int,
    *,
    draft_sampling: Sampling | None = None,
) -> list[tuple[Float[np.ndarray, " text"], DraftRows]]:
    """For each text, the log of the target's probabilities, and what the drafter's rows say.

    Args:
        parts: The target is theirs; it has a free slot for each text.
        drafter: The drafter.
        continuations: The texts.
        sampling: How the texts were drawn.
        depth: Deepest draft token.
        draft_sampling: How drafts are drawn, if otherwise. Then predictions are wrong: it is there to test them.
    """
    of_drafts = drafters_sampling(draft_sampling or sampling, "without_replacement")
    parts = replace(parts, drafter=drafter, length=FixedLength(num_speculative_tokens=depth))
    states: list[Running] = []
    try:
        for i, each in enumerate(continuations):
            request = Request(
                id=str(i), prompt=each.prompt, max_new_tokens=len(each.text.tokens), sampling=replace(sampling, seed=i)
            )
            states.append(begin(parts, request))
            prefill(parts, states[-1])
        targets = [
            _target_rows(parts, state, each.text, sampling) for state, each in zip(states, continuations, strict=True)
        ]
        notes = [
            _Notes.of(drafter, each.text, rows, sampling, of_drafts, depth)
            for each, rows in zip(continuations, targets, strict=True)
        ]
        for place in range(max(len(each.text.tokens) for each in continuations)):
            here = [i for i, each in enumerate(continuations) if place < len(each.text.tokens)]
            _guess(parts, [states[i] for i in here], [notes[i] for i in here], place)
            _go_on(parts, [states[i] for i in here], [int(continuations[i].text.tokens[place]) for i in here])
        return [(each.log_p, each.rows()) for each in notes]
    finally:
        for state in states:
            end(parts, state)


def _target_rows(parts: Parts, state: Running, text: TargetText, sampling: Sampling) -> Float[Tensor, "text vocab"]:
    """The target's row before each token of the text. The slot stays as it is."""
    tokens = torch.tensor([state.tokens[-1], *text.tokens[:-1].tolist()]).to(parts.target.device)
    logits = parts.target.extend([Segment(slot=state.slot, tokens=tokens)]).logits
    parts.target.commit({state.slot: range(0)})
    if sampling.temperature == 0:
        # The greedy text is certain, also where two forwards break a tie differently.
        return torch.nn.functional.one_hot(torch.from_numpy(text.tokens), logits.shape[1]).double()
    return _rows(logits, sampling).double().cpu()


def _rows(logits: Float[Tensor, "n vocab"], sampling: Sampling) -> Float[Tensor, "n vocab"]:
    return to_rows(logits, np.arange(len(logits)), [sampling] * len(logits), _no_text)


def _no_text() -> Before:
    raise RuntimeError("rows without penalties read no text")


@dataclass(frozen=True, kw_only=True)
class _Notes:
    """What is noted along one text; the arrays change in place."""

    greedy: bool
    draft_sampling: Sampling
    pure: bool
    depth: int
    tokens: list[int]
    p: Float[Tensor, "text vocab"]
    log_p: Float[np.ndarray, " text"]
    log_q: Float[np.ndarray, "text depth"]
    coupled: Float[np.ndarray, "text depth"]
    guesses: np.ndarray
    trees: dict[str, Float[np.ndarray, "text levels ..."]]

    @classmethod
    def of(
        cls,
        drafter: Drafter,
        text: TargetText,
        p: Float[Tensor, "text vocab"],
        sampling: Sampling,
        draft_sampling: Sampling,
        depth: int,
    ) -> "_Notes":
        # Where rows depend on the tokens alone, the first guess at each place says all.
        pure = drafter.context_pure and drafter.rows == "sampled"
        count, stored = len(text.tokens), 1 if pure else depth
        chances = p[torch.arange(count), torch.from_numpy(text.tokens)].numpy()
        sizes = {name: tree.chances(np.ones(1), np.ones(1), 0, 0.0).shape for name, tree in KINDS.items()}
        levels = 1 if pure else min(depth, TREE_DEPTH)
        return cls(
            greedy=sampling.temperature == 0,
            draft_sampling=draft_sampling,
            pure=pure,
            depth=depth,
            tokens=text.tokens.tolist(),
            p=p,
            log_p=np.log(np.maximum(chances, 1e-300)),
            log_q=np.full((count, stored), -np.inf),
            coupled=np.zeros((count, stored)),
            guesses=np.zeros(count, dtype=np.int64),
            trees={}
            if drafter.rows == "point"
            else {
                name: np.zeros((count, stored if name == "ranks" else levels, *size)) for name, size in sizes.items()
            },
        )

    def note(self, place: int, depth: int, q: Float[Tensor, " vocab"]) -> None:
        """Note the row that guesses the token `depth` behind a place."""
        at = place + depth
        token, p, q_row = self._possible(self.tokens[at], self.p[at].numpy(), q.double().numpy())
        if self.greedy:
            self.log_q[place, depth] = 0.0 if int(q_row.argmax()) == token else -np.inf
            self.coupled[place, depth] = float(int(q_row.argmax()) == token)
        elif q_row[token] > 0 and p[token] > 0:
            self.log_q[place, depth] = np.log(q_row[token])
            together = np.maximum(p / p[token], q_row / q_row[token]).sum()
            self.coupled[place, depth] = min(1.0, 1 / (together * p[token]))
        for name, values in self.trees.items():
            if depth < values.shape[1]:
                values[place, depth] = KINDS[name].chances(p, q_row, token, 0.5) if p[token] > 0 else 0.0

    @staticmethod
    def _possible(token: int, p: np.ndarray, q: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
        """Both rows over the tokens that either can emit and the text's own, which says the same as the whole rows."""
        kept = (p > 0) | (q > 0)
        kept[token] = True
        return int(kept[:token].sum()), p[kept], q[kept]

    def note_point(self, place: int, depth: int, token: int) -> None:
        """Note the one token that a drafter proposes."""
        self.guesses[place] = depth + 1
        if place + depth < len(self.tokens) and token == self.tokens[place + depth]:
            self.log_q[place, depth] = 0.0
            self.coupled[place, depth] = 1.0

    def rows(self) -> DraftRows:
        return DraftRows(
            pure=self.pure, log_probs=self.log_q, coupled=self.coupled, guesses=self.guesses, trees=self.trees
        )


def _room(parts: Parts, state: Running, note: _Notes, place: int) -> int:
    """Deepest token of a draft that begins at a place."""
    drafter = parts.drafter
    if drafter.taps and place == 0:
        # The first step of a request is a plain one.
        return 0
    limits = [note.depth, len(note.tokens) - place, drafter.max_depth or note.depth]
    if drafter.max_context is not None:
        limits.append(drafter.max_context - len(state.tokens) - 1)
    return max(0, min(limits))


def _guess(parts: Parts, states: Sequence[Running], notes: Sequence[_Notes], place: int) -> None:
    """Let the drafter guess the next tokens, and note what it thinks of the text's own. Nothing is accepted."""
    rooms = [_room(parts, state, note, place) for state, note in zip(states, notes, strict=True)]
    here = [i for i, room in enumerate(rooms) if room > 0]
    drafter = parts.drafter
    if here:
        counts = [1 if notes[i].pure else rooms[i] for i in here]
        some = [states[i] for i in here]
        guess, active = drafter.begin(some, counts), list(range(len(here)))
        for depth in range(max(counts)):
            going: list[int] = []
            tokens: list[int] = []
            rows = None if guess.tokens is not None else _draft_rows(guess, notes[here[0]].draft_sampling)
            for row, k in enumerate(active):
                note = notes[here[k]]
                if rows is None:
                    proposed = int(guess.tokens[row])  # type: ignore[index]
                    if proposed < 0:
                        continue
                    note.note_point(place, depth, proposed)
                    following = proposed
                else:
                    note.note(place, depth, rows[row])
                    note.guesses[place] = note.depth if note.pure else depth + 1
                    following = note.tokens[place + depth]
                    if guess.short_list is not None and int(guess.short_list.places[following]) < 0:
                        # The drafter cannot go on behind a token that it does not have.
                        note.guesses[place] = rooms[here[k]]
                        continue
                if depth + 1 < counts[k]:
                    going.append(k)
                    tokens.append(following)
            if not going:
                break
            active = going
            guess = drafter.expand(
                some,
                Frontier(
                    owners=np.array(active),
                    nodes=np.full(len(active), depth + 1),
                    parents=np.full(len(active), depth),
                    depths=np.full(len(active), depth + 1),
                    tokens=torch.tensor(tokens).to(drafter.device or parts.target.device),
                ),
            )
    drafter.commit(states, [[] for _ in states])


def _draft_rows(guess: Guess, sampling: Sampling) -> Float[Tensor, "n vocab"]:
    """The rows of a guess over the whole vocabulary, as a branching tree draws from them."""
    if guess.logits is None:
        raise InputError("a drafter guessed neither rows nor tokens")
    rows = _rows(guess.logits, sampling)
    return (rows if guess.short_list is None else guess.short_list.widened(rows)).cpu()


def _go_on(parts: Parts, states: Sequence[Running], tokens: Sequence[int]) -> None:
    """Run the target on each anchor; the text's token is the next one."""
    target, drafter = parts.target, parts.drafter
    anchors = [state.tokens[-1] for state in states]
    taps = target.extend(
        [
            Segment(slot=state.slot, tokens=torch.tensor([anchor]).to(target.device), logits="none")
            for state, anchor in zip(states, anchors, strict=True)
        ],
        taps=drafter.taps,
    ).taps
    target.commit({state.slot: range(1) for state in states})
    for state, token in zip(states, tokens, strict=True):
        state.tokens.append(token)
        state.num_steps += 1
    observed = Observed(tokens=np.array(anchors), offsets=np.arange(len(states) + 1), taps=taps)
    drafter.observe(states, observed)
