"""What works with a target, how well a drafter fits it, and the speedup to expect on this machine."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from outrider.bench.agreement import FreeRun, RowAgreement, along_text, run_freely
from outrider.bench.costs import Costs, measure_costs
from outrider.core.deadline import ENDLESS, Deadline
from outrider.core.types import InputError
from outrider.drafters.model import LEAST_SHARE
from outrider.engine.engine import Engine
from outrider.lm.hf.capabilities import Capability
from outrider.lm.vocabulary import translation

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
"""Draft lengths of the table of speedups."""
ACCEPTANCES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""Acceptance rates of that table."""
EXAMPLES = 5
"""Most tokens that are named where two vocabularies differ."""
OPENING = 16
"""Tokens of each text that are the prompt of a free run."""
NEW_TOKENS = 64
"""Most tokens that a free run adds to each."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """A model's files without its weights."""

    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase | None


@dataclass(frozen=True, kw_only=True)
class Aspect:
    """One property of both models, side by side.

    Attributes:
        means: What a difference means; empty where there is none.
    """

    name: str
    target: str
    draft: str
    same: bool
    means: str = ""


def compare_sides(target: Side, draft: Side) -> list[Aspect]:
    """Tokenizers and configs of a target and a draft model, thing by thing."""
    aspects = [_vocabulary(target, draft)]
    if target.tokenizer is not None and draft.tokenizer is not None:
        ours, theirs = target.tokenizer, draft.tokenizer
        added = [{token: i for i, token in _added(side).items()} for side in (ours, theirs)]
        templates = [side.chat_template or "" for side in (ours, theirs)]
        shown = [f"{len(template)} characters" if template else "none" for template in templates]
        aspects += [
            _aspect(
                "special tokens",
                ours.special_tokens_map,
                theirs.special_tokens_map,
                "the target's are used; a draft model that knows others accepts less around them",
            ),
            _aspect("added tokens", added[0], added[1], "ids that only one model knows are never drafted well"),
            Aspect(
                name="chat template",
                target=shown[0],
                draft=shown[1],
                same=templates[0] == templates[1],
                means="" if templates[0] == templates[1] else "the target's is used; the draft model may know another",
            ),
        ]
    rows = (
        (
            "end token",
            "eos_token_id",
            "the target's ends a request; a draft model with another drafts less well there",
        ),
        ("begin token", "bos_token_id", "prompts begin as the target's do, which the draft model may not be used to"),
        ("padding token", "pad_token_id", "nothing: padding is never read"),
        ("context length", "max_position_embeddings", "beyond the shorter context nothing is drafted"),
        ("dtype", "dtype", "the draft model is loaded in the target's, unless the drafter says dtype=..."),
        ("rotary embedding", "rope_parameters", "nothing: each model uses its own"),
    )
    texts = [side.config.get_text_config(decoder=True) for side in (target, draft)]
    for name, field, means in rows:
        aspects.append(_aspect(name, getattr(texts[0], field, None), getattr(texts[1], field, None), means))
    return aspects


def _aspect(name: str, target: object, draft: object, means: str) -> Aspect:
    same = target == draft
    return Aspect(name=name, target=_short(target), draft=_short(draft), same=same, means="" if same else means)


def _short(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={each}" for key, each in value.items()) or "none"
    return str(value).removeprefix("torch.")


def _added(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {i: str(token) for i, token in tokenizer.added_tokens_decoder.items()}


def _vocabulary(target: Side, draft: Side) -> Aspect:
    """Which token ids mean different things."""
    if target.tokenizer is None or draft.tokenizer is None:
        sizes = [side.config.get_text_config(decoder=True).vocab_size for side in (target, draft)]
        return _aspect("vocabulary", sizes[0], sizes[1], "there are no two tokenizers to compare; sizes must be equal")
    ours, theirs = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    by_id = [{i: token for token, i in each.items()} for each in (ours, theirs)]
    wrong = sorted(i for i in by_id[0].keys() | by_id[1].keys() if by_id[0].get(i) != by_id[1].get(i))
    named = "; ".join(f"{i} is {by_id[0].get(i)!r} and {by_id[1].get(i)!r}" for i in wrong[:EXAMPLES])
    means = f"{len(wrong)} token ids differ ({named}{'; ...' if len(wrong) > EXAMPLES else ''}); "
    words = translation(target.tokenizer, draft.tokenizer, *(max(each, default=0) + 1 for each in by_id))
    means += f"the {len(words.ours)} tokens that both have are drafted, {words.share:.1%} of the target's"
    if words.share < LEAST_SHARE:
        means += f", and below {LEAST_SHARE:.0%} the draft model is refused"
    return Aspect(
        name="vocabulary",
        target=f"{len(ours)} tokens",
        draft=f"{len(theirs)} tokens",
        same=not wrong,
        means=means if wrong else "",
    )


@dataclass(frozen=True, kw_only=True)
class Worth:
    """The speedup at each acceptance, by the costs of this machine.

    Attributes:
        costs: Of one drafter call and of one more verified token, in forwards of the target over one token.
        acceptance: Measured, of one token.
        speedups: By acceptance and length; the first row is the measured acceptance.
        break_even: By length, the acceptance that is as fast as plain decoding; None where none is.
        best_length: Fastest length at the measured acceptance.
        best_speedup: What it would give. At most 1 means that no length pays: drafting nothing is the fastest.
        num_requests: How many requests ran together when costs were timed.
    """

    costs: Costs
    acceptance: float
    speedups: dict[float, dict[int, float]]
    break_even: dict[int, float | None]
    best_length: int
    best_speedup: float
    num_requests: int = 1

    @classmethod
    def of(cls, costs: Costs, acceptance: float, num_requests: int = 1) -> "Worth":
        """Compute the table."""
        best = costs.best_length(acceptance, LENGTHS)
        return cls(
            costs=costs,
            acceptance=acceptance,
            speedups={a: {n: costs.speedup(a, n) for n in LENGTHS} for a in (acceptance, *ACCEPTANCES)},
            break_even={n: costs.break_even(n) for n in LENGTHS},
            best_length=best,
            best_speedup=costs.speedup(acceptance, best),
            num_requests=num_requests,
        )


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The findings of `outrider doctor`.

    Attributes:
        capabilities: Of the target.
        drafter: As it was given; None where there was none.
        aspects: Target and draft model side by side; None where the drafter is no model.
        refusal: Why the pair cannot be put together; None if it can, or was not tried.
        notes: What was left out, and why.
        by_position: Agreement of rows along the text.
        by_depth: Agreement of rows into drafts that begin in the text; depth 1 is the text itself.
        free: Acceptance while the target continues prompts.
        worth: The speedup to expect here, for a single request.
        worth_together: The same, for as many requests together as the engine takes; None where it takes one.
    """

    capabilities: Sequence[Capability]
    drafter: str | None = None
    aspects: Sequence[Aspect] | None = None
    refusal: str | None = None
    notes: Sequence[str] = ()
    by_position: Sequence[RowAgreement] | None = None
    by_depth: Sequence[RowAgreement] | None = None
    free: FreeRun | None = None
    worth: Worth | None = None
    worth_together: Worth | None = None

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What running a pair on texts gave; see `Diagnosis`."""

    notes: Sequence[str]
    by_position: Sequence[RowAgreement] | None
    by_depth: Sequence[RowAgreement] | None
    free: FreeRun
    worth: Worth | None
    worth_together: Worth | None


def measure(
    engine: Engine,
    texts: Sequence[Sequence[int]],
    *,
    num_speculative_tokens: int = 5,
    temperature: float = 1.0,
    rounds: int = 3,
    until: Deadline = ENDLESS,
) -> Measured:
    """Run a pair on texts: along them, freely from how they begin, and against the clock.

    Args:
        texts: Token ids.
        rounds: How often costs are timed; 0 leaves them out.
        until: When measuring ends, about: what is not measured then is left out, and the notes say how much was.
    """
    notes = []
    pairs, along = None, until.part(0.4)
    if engine.parts.drafter.rows == "sampled":
        pairs = along_text(
            engine,
            texts,
            num_speculative_tokens=num_speculative_tokens,
            temperature=temperature,
            until=along,
        )
        asked = sum(len(text) - 1 for text in texts)
        if along.passed and (seen := int((pairs.depths == 1).sum())) < asked:
            notes.append(f"There was time for {seen} of {asked} positions of the text; more with --time-limit.")
    else:
        notes.append("The drafter gives no distribution after each prefix: only its free running can be measured.")
    prompts = [list(text[: max(1, min(OPENING, len(text) // 2))]) for text in texts if text]
    running = until.part(0.5)
    free = run_freely(
        engine,
        prompts,
        num_speculative_tokens=num_speculative_tokens,
        temperature=temperature,
        max_new_tokens=NEW_TOKENS,
        until=running,
    )
    if running.passed:
        notes.append(f"There was time for {free.num_steps} steps of free running; more with --time-limit.")
    worths: dict[int, Worth] = {}
    try:
        for count in sorted({1, engine.max_slots}) if rounds else ():
            costs = measure_costs(engine, rounds=rounds, num_requests=count, until=until)
            worths[count] = Worth.of(costs, free.acceptance, count)
    except InputError as error:
        notes.append(f"Costs could not be measured: {error}.")
    return Measured(
        notes=notes,
        by_position=None if pairs is None else pairs.by_position(),
        by_depth=None if pairs is None else pairs.by_depth(),
        free=free,
        worth=worths.get(1),
        worth_together=worths.get(engine.max_slots) if engine.max_slots > 1 else None,
    )
