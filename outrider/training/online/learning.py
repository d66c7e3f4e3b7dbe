"""Online speculative decoding: draft models that learn from the traffic that they serve (Liu et al. 2023)."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import cast

from outrider.assembly import completed, tokenizer_of
from outrider.catalog import make, name_of
from outrider.core.destination import locked
from outrider.core.inputs import InputError
from outrider.core.types import Request
from outrider.decoding.protocol import Cycle
from outrider.drafters.model import ModelDrafter, ModelPath
from outrider.drafters.protocol import Drafter
from outrider.engine.engine import Engine
from outrider.lm.model import LanguageModel
from outrider.lm.recurrent import RecurrentModel
from outrider.lm.translated import Translated
from outrider.lm.weights.plain import has_blocks
from outrider.setup import Setup
from outrider.training.online.corrections import corrections
from outrider.training.online.pupil import OnlineSettings, Pupil
from outrider.training.online.snapshots import Snapshots

OTHER_VOCABULARY = (
    "this draft model has another vocabulary than the target, so the target's rows cannot teach it; learning needs a "
    "draft model with the target's vocabulary"
)
CUT = "the output layer of this draft model is cut to some tokens; leave out token_map"
PACKED = (
    "the weights of this draft model are packed and cannot be trained; leave out weights=..., or make plain ones of a "
    "GGUF file, as model:path=...,dtype=bfloat16"
)
Router = Callable[[Request], int]
"""Returns the number of the draft model that drafts for a request, from 0. Called once per request."""


class Learning:
    """Lets the draft models of an engine learn from its requests. Changes the engine in place until `finish`.

    After every verification, the places where the target replaced a draft token go into a buffer. When enough requests
    have ended, one optimizer step lowers the divergence at these places. The new weights draft for new requests.
    Running requests keep the weights that they began with: rows are always those that draft tokens were drawn from, and
    the law is the target's. While a drafter learns, only the law is promised: a seed repeats no output above
    temperature 0.

    If there are several draft models, `route` chooses one for each request, and each learns from its own requests only.

    Attributes:
        pupils: The draft models.

    Args:
        engine: An engine with a draft model.
        settings: How to learn.
        route: Returns the number of a request's draft model; needed if there are several.
        num_drafts: Number of draft models. All begin as copies of the engine's own.

    Raises:
        InputError: The engine's drafter cannot learn.

    Example:
        >>> import outrider
        >>> engine = outrider.load(length="fixed:4")
        >>> learning = Learning(engine, OnlineSettings(interval=1, learning_rate=1e-3))
        >>> sampling = outrider.Sampling(temperature=1, seed=0)
        >>> outputs = engine.generate(["Once upon a time"], max_new_tokens=32, sampling=sampling)
        >>> learning.finish()
        >>> learning.pupils[0].draft.num_rounds >= 1
        True

    References:
        Liu et al. 2023. https://arxiv.org/abs/2310.07177
    """

    def __init__(
        self,
        engine: Engine,
        settings: OnlineSettings | None = None,
        *,
        route: Router | None = None,
        num_drafts: int = 1,
    ) -> None:
        self.settings = settings or OnlineSettings()
        if num_drafts < 1:
            raise InputError(f"the number of draft models must be >= 1, got {num_drafts}")
        if num_drafts > 1 and route is None:
            raise InputError(f"{num_drafts} draft models need a route that chooses one for each request")
        if (reason := why_not(engine.parts.drafter)) is not None:
            raise InputError(reason)
        if engine.between is not None or engine.route is not None:
            raise InputError("something else replaces this engine's drafters already; end it first")
        self._engine, self._choose, self._watched = engine, route, engine.watch
        self.pupils = [self._pupil(number, num_drafts) for number in range(num_drafts)]
        self._held = ExitStack()
        if (folder := self.settings.snapshots) is not None:
            self._held.enter_context(locked(folder.with_name(f".{folder.name}.lock"), folder))
        engine.watch, engine.between = self._note, self._between
        if route is not None:
            engine.route = self._route
        else:
            engine.swap(self.pupils[0].draft.drafter)

    def finish(self) -> None:
        """End learning. New requests get the newest weights, and the last snapshots are written."""
        self._engine.watch, self._engine.between = self._watched, None
        with self._held:
            for pupil in self.pupils:
                pupil.finish(self._engine.running)
        self._engine.swap(self.pupils[0].draft.drafter)

    def _pupil(self, number: int, count: int) -> Pupil:
        snapshots = None
        if self.settings.snapshots is not None:
            folder = self.settings.snapshots if count == 1 else self.settings.snapshots / f"draft-{number}"
            snapshots = Snapshots(folder=folder, tokenizer=self._engine.tokenizer)
            snapshots.check(resume=self.settings.resume)
        # `why_not` has let it pass. Each draft model begins as a value of its own.
        drafter = replace(cast(ModelDrafter, self._engine.parts.drafter))
        return Pupil(drafter, self.settings, snapshots)

    def _note(self, cycle: Cycle) -> None:
        """Keep what a verification found."""
        if self._watched is not None:
            self._watched(cycle)
        owners = [self._owner(state.drafter) for state in cycle.states]
        for i, (state, pupil) in enumerate(zip(cycle.states, owners, strict=True)):
            if pupil is not None:
                drafted = cycle.draft.num_draft_tokens(i)
                pupil.note(state.request.id, drafted=drafted, accepted=int(cycle.verdict.num_accepted[i]))
        for correction in corrections(cycle):
            pupil = self._owner(correction.drafter)
            if pupil is not None:
                pupil.buffer.add(correction)

    def _between(self) -> None:
        """Let each draft model learn, and give its new weights to new requests."""
        running = self._engine.running
        for pupil in self.pupils:
            drafter = pupil.between(running)
            if drafter is not None and pupil is self.pupils[0]:
                self._engine.swap(drafter)

    def _route(self, request: Request) -> Drafter:
        """The drafter of a request."""
        number = 0 if self._choose is None else self._choose(request)
        if not 0 <= number < len(self.pupils):
            raise InputError(f"the route chose draft model {number} of {len(self.pupils)}; they are numbered from 0")
        return self.pupils[number].draft.drafter

    def _owner(self, drafter: object) -> Pupil | None:
        """The draft model that a drafter is a version of; None for other drafters."""
        return next((pupil for pupil in self.pupils if pupil.draft.owns(drafter)), None)


def check_setup(setup: Setup) -> None:
    """Raise InputError where `Learning` would refuse the drafter of a setup, as far as names and tokenizers tell: no
    weights are read.
    """
    whole = completed(setup)
    part = make("drafter", whole.drafter) if isinstance(whole.drafter, str) else whole.drafter
    reason = why_not(part) if isinstance(part, Drafter) else None
    if isinstance(part, ModelPath):
        ours, theirs = tokenizer_of(whole), part.read_tokenizer()
        if part.token_map is not None:
            reason = CUT
        elif part.weights is not None:
            reason = PACKED
        elif ours is not None and theirs is not None and ours.get_vocab() != theirs.get_vocab():
            reason = OTHER_VOCABULARY
    if reason is not None:
        raise InputError(reason)


def why_not(drafter: Drafter) -> str | None:
    """Why a drafter cannot learn from traffic, in one sentence; None if it can."""
    name = name_of(drafter)
    if drafter.trainer is None:
        return f"the drafter {name} has no weights to train; learning needs a draft model, such as model:path=..."
    lm = getattr(drafter, "lm", None)
    if drafter.trainer != "distill" or not isinstance(lm, LanguageModel | RecurrentModel | Translated):
        return f"the drafter {name} cannot learn from traffic; learning needs a draft model, such as model:path=..."
    if isinstance(lm, Translated):
        return OTHER_VOCABULARY
    if getattr(drafter, "short_list", None) is not None:
        return CUT
    if getattr(lm.model, "is_quantized", False):
        return "the weights of this draft model are quantised and cannot be trained; use a draft model that is not"
    if has_blocks(lm.model):
        return PACKED
    return None
