"""The engine: takes requests, gives each a slot, prefills it, steps all active requests together, returns text."""

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import numpy as np
from transformers import PreTrainedTokenizerBase

from outrider.constraints.grammar import Grammar
from outrider.core import ranks
from outrider.core.constraint import Constraint
from outrider.core.dice import Dice
from outrider.core.inputs import whole
from outrider.core.option import Bounds
from outrider.core.types import InputError, Request, Running, Sampling, Step
from outrider.decoding.drafting import drafter_of
from outrider.decoding.protocol import Parts, Watch
from outrider.decoding.step import StepDecoding
from outrider.drafters.none import NoDrafter
from outrider.drafters.protocol import Drafter
from outrider.engine.admission import Route
from outrider.engine.generation import Generation, Keywords, SharedKeywords, takes_options
from outrider.engine.lock import Lock, alone
from outrider.engine.mailbox import Mailboxes
from outrider.engine.output import Output, Update, succeeded
from outrider.engine.prompts import BESIDE_MESSAGES, Prompt, Tool, encode
from outrider.engine.requests import (
    bound,
    check,
    check_beside,
    check_count,
    listed,
    narrowed,
    nth,
    one_each,
    texts,
    tokens,
)
from outrider.engine.schedule import Schedule
from outrider.host.remembered import shapes
from outrider.lengths.experience import Experience
from outrider.lengths.fixed import FixedLength
from outrider.lm.hf.generation_config import GenerationRules
from outrider.trees.chain import ChainTree
from outrider.verifiers.match import MatchVerifier

Sink = Callable[[Step], None]
OF_BOTH = (
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
    "include_stop",
    "priority",
    "max_draft_tokens",
    "max_draft_context",
    "owner",
)
"""Options of `Generation` that are fields of `Request` too."""


class Engine:
    """Speculative decoding of many requests at once. `outrider.load` makes one.

    Any number of `stream` and `generate` calls may run at once, in one thread or in many. Each step serves the requests
    of all of them, and each call gets the updates of its own requests. `step` returns the updates of requests that
    `add` queued.

    Attributes:
        watch: Called once per step with its draft, the target's rows and the verdict; None calls nothing.
        between: Called after each step, when no forward runs; it may call `swap`. None calls nothing.
        route: Returns a request's drafter, once, when the request gets its slot. None gives all the drafter of `parts`.

    Args:
        parts: Target, drafter, tree, verifier, length policy and decoding.
        tokenizer: For text prompts, text output, stop strings and chat; token ids work without it.
        eos_ids: Token ids that end an output.
        stop: Strings that end an output.
        sampling: Settings of requests without settings of their own.
        rules: What the target's generation config asks of all requests, besides the settings.
        max_slots: Most requests that run at once; other requests wait.
        keep_warm: Whether the slot of an ended request stays allocated until another request needs it, so that a prompt
            with the same beginning can reuse its cache.
        max_warm_slots: Slots beside `max_slots` that are for ended requests alone. The target must have so many more.
        max_warm_tokens: Most tokens in such slots together. Where there are more, the slots that were used longest ago
            are released. None sets no limit: the warm slots may fill the cache.
        max_prefill_tokens: Most prompt tokens that one step prefills, over all requests, first come first served. A
            smaller number delays decoding requests less when new prompts arrive. By default 2,048, and 512 on CPUs
            while other requests decode.
        dice: Makes the dice of one step; by default those that the verifier wants, keyed by each request's seed.
        needs_seeds: Whether requests above temperature 0 must come with a seed.
        refuses: Returns in one sentence why parts do not fit each other, or None; called when a part is replaced.
        lender: An engine over the same target. A slot that it keeps warm is released when this engine needs a slot.
        measure: Measures what steps of the parts cost, and returns what the engine knows then. Called if the costs turn
            out to be wrong, or if a new kind of drafter has none, as soon as no request runs. None calls nothing.

    Example:
        >>> import outrider
        >>> engine = outrider.load()
        >>> [out] = engine.generate(["Once upon a time"], max_new_tokens=8, sampling=outrider.Sampling(temperature=0))
        >>> len(out.tokens), out.finish_reason
        (8, 'length')
    """

    def __init__(
        self,
        parts: Parts,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        eos_ids: frozenset[int] = frozenset(),
        stop: Sequence[str] = (),
        sampling: Sampling | None = None,
        rules: GenerationRules | None = None,
        max_slots: int = 8,
        max_prefill_tokens: int | None = None,
        keep_warm: bool = True,
        max_warm_slots: int = 0,
        max_warm_tokens: int | None = None,
        dice: Callable[[Sequence[Running]], Dice] | None = None,
        needs_seeds: bool = False,
        refuses: Callable[[Parts], str | None] | None = None,
        measure: Callable[[Parts], Experience] | None = None,
        lender: "Engine | None" = None,
    ) -> None:
        Bounds(least=1).check("max_prefill_tokens", max_prefill_tokens)
        Bounds(least=0).check("max_warm_slots", max_warm_slots)
        Bounds(least=0).check("max_warm_tokens", max_warm_tokens)
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.stop = tuple(stop)
        self.sampling = sampling or Sampling()
        self.rules = rules
        self.max_slots = max_slots
        self.max_prefill_tokens = max_prefill_tokens
        self.max_warm_slots = max_warm_slots
        self.max_warm_tokens = max_warm_tokens
        self.dice = dice
        self.watch: Watch | None = None
        self.between: Callable[[], None] | None = None
        self.route: Route | None = None
        self._needs_seeds = needs_seeds
        self._refuses = refuses
        self._measure = measure
        self._lender = lender
        # Both engines change the target's slots, so one thread at a time runs either.
        self._lock: Lock = Lock() if lender is None else lender._lock
        self._mail = Mailboxes()
        self._schedule: Schedule = Schedule(
            parts,
            tokenizer,
            max_slots=max_slots,
            max_warm=max_slots + max_warm_slots if keep_warm else 0,
            max_warm_slots=max_warm_slots,
            lender=None if lender is None else lender._schedule.prefixes,
            max_warm_tokens=max_warm_tokens,
            deliver=self._mail.deliver,
        )
        self._seeds = np.random.SeedSequence(ranks.of_first(np.random.SeedSequence().entropy))

    @property
    def parts(self) -> Parts:
        """The parts that decode new requests."""
        return self._schedule.parts

    @parts.setter
    def parts(self, parts: Parts) -> None:
        self._schedule.parts = parts

    @property
    def _shares_noise(self) -> bool:
        """Whether outputs depend on their seeds and the target alone, whatever is drafted."""
        return getattr(self.parts.verifier, "shares_noise", False)

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running, or `step` has updates to return that other callers' steps made."""
        return bool(self._schedule.seats) or self._mail.waits

    @property
    def running(self) -> dict[str, Drafter]:
        """The drafter of each request that has a slot, by the request's id."""
        return self._schedule.running

    @property
    def num_cached_tokens(self) -> int:
        """Tokens in the target's cache, those of ended requests included."""
        return self._schedule.num_cached_tokens

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a slot."""
        return len(self._schedule.waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of the prompts that wait for a slot."""
        return self._schedule.waiting.num_tokens

    @property
    def num_unread_tokens(self) -> int:
        """Prompt tokens that the target has not run on yet, those of waiting requests included."""
        return self._schedule.num_unread_tokens

    @property
    def num_reused_tokens(self) -> int:
        """Prompt tokens so far that needed no prefill, because another request's text begins with them."""
        return self._schedule.prefixes.num_reused_tokens

    @alone
    def encode(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[Tool] | None = None,
        documents: Sequence[Mapping[str, str]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a prompt. Chat messages go through the tokenizer's chat template, which opens the answer, or
        continues a last message of the assistant. The options are those of `Generation`.
        """
        return encode(
            prompt, self.tokenizer, tools=tools, documents=documents, chat_template_kwargs=chat_template_kwargs
        )

    @alone
    @takes_options
    def add(
        self,
        prompt: Prompt | Request,
        *,
        id: str | None = None,
        options: Generation | None = None,
        **keywords: Unpack[Keywords],
    ) -> str:
        """Queue a request and return its id. Raises InputError if it cannot be run.

        Args:
            prompt: A text, a list of token ids or a list of chat messages. A `Request` has its own settings: of the
                options, `constraint`, `allowed_token_ids` and `bad_words` alone may be given beside it.
            id: A name that no running request has; by default a random one.
            options: What is asked of the request.
            keywords: Fields of `Generation`; they override those of `options`.
        """
        if isinstance(prompt, Request):
            check_beside(prompt, id, keywords)
        request = self.request(prompt, id=id, options=Generation.of(options, keywords))
        if request.sampling.seed is not None:
            request = replace(request, repeats=request.sampling.temperature > 0 and not self._shares_noise)
        else:
            seed = int(self._seeds.spawn(1)[0].generate_state(1, np.uint64)[0])
            request = replace(request, sampling=replace(request.sampling, seed=seed))
        if request.id in self._schedule.seats:
            raise InputError(f"a request {request.id!r} is already running; ids must be unique")
        self._schedule.queue(request)
        return request.id

    def request(self, prompt: Prompt | Request, *, id: str | None = None, options: Generation | None = None) -> Request:
        """The request that `add` queues for a prompt and options; it changes nothing, so any thread may call it.

        Raises InputError if it cannot be run. The arguments are those of `add`.
        """
        generation = Generation.of(options, {})
        if isinstance(prompt, Request):
            usual = Generation()
            check_beside(
                prompt, id, [name for name, value in vars(generation).items() if value is not vars(usual)[name]]
            )
            request = prompt
        else:
            beside = {name: getattr(generation, name) for name in BESIDE_MESSAGES}
            request = Request(
                id=id or uuid.uuid4().hex[:12],
                prompt=tuple(encode(prompt, self.tokenizer, **beside)),
                max_new_tokens=generation.max_new_tokens,
                sampling=generation.sampling or self.sampling,
                eos_ids=self.ends(generation),
                prediction=tuple(generation.prediction),
                stop=self.stops(generation),
                **{name: getattr(generation, name) for name in OF_BOTH},
            )
            if self.rules is not None and request.prompt:
                rules = self.rules.of(request.prompt, request.max_new_tokens)
                settings = replace(request.sampling, processors=(*rules, *request.sampling.processors))
                request = replace(request, sampling=settings)
        width, rule = self.parts.target.vocab_size, request.constraint
        if generation.constraint is not None:
            rule = bound(generation.constraint, self.tokenizer, width, request.eos_ids)
        rule = narrowed(rule, generation.allowed_token_ids, generation.bad_words, self.tokenizer, width)
        if rule is not request.constraint:
            request = replace(request, constraint=rule)
        if self._needs_seeds and request.sampling.seed is None and request.sampling.temperature > 0:
            raise InputError(
                "a reproducible output above temperature 0 needs a seed; give one with --seed (Sampling(seed=...)) "
                "or leave out --reproducible (reproducible=True)"
            )
        check(request, self.parts.target, self.tokenizer)
        return request

    def ends(self, options: Generation) -> frozenset[int]:
        """The tokens that end an output made with these options. Raises InputError for unknown tokens."""
        eos_ids = frozenset() if options.ignore_eos else self.eos_ids
        return eos_ids | tokens("stop_token_ids", options.stop_token_ids, self.parts.target.vocab_size)

    def stops(self, options: Generation) -> tuple[str, ...]:
        """The strings that end an output made with these options."""
        return texts(options.stop) + (() if options.ignore_eos else self.stop)

    @alone
    def step(self, sink: Sink | None = None) -> list[Update]:
        """Admit requests, prefill new prompts, then draft, verify and commit for all ready requests.

        A request that fails ends with `finish_reason` `error`, and the others continue. If a step of several requests
        fails, it is undone and each request makes its next step alone, so that only the request at fault fails again.
        The repeated steps use the same draws, so the other requests lose nothing but time. An interrupt undoes the step
        too.

        Args:
            sink: Called with the step of each returned update.

        Returns:
            The updates of requests that no `stream` or `generate` waits for: from this step, and from steps that other
            callers have made since the last call.
        """
        self._advance()
        updates = self._mail.take()
        for update in updates:
            if sink is not None and update.step is not None:
                sink(update.step)
        return updates

    @alone
    def cancel(self, id: str) -> Output | None:
        """End a request now. Returns its output so far, or None if there is no such request."""
        output = self._schedule.cancel(id)
        if output is not None and self._mail.is_claimed(id):
            self._mail.deliver(Update(id=id, tokens=[], text="", output=output))
        return output

    @takes_options
    def stream(
        self,
        prompt: Prompt | Request,
        *,
        id: str | None = None,
        options: Generation | None = None,
        **keywords: Unpack[Keywords],
    ) -> Iterator[Update]:
        """Run one request beside all other active ones, and yield its updates.

        The arguments are those of `add`. Leaving the loop early cancels the request. If an error ends the request, it
        is raised.
        """
        if isinstance(prompt, Request):
            check_beside(prompt, id, keywords)
        id = self._claimed(prompt, Generation.of(options, keywords), id)
        try:
            ended = False
            while not ended:
                for update in self._wait([id]):
                    ended = update.output is not None
                    yield succeeded(update)
        finally:
            self._leave([id])

    @takes_options
    def generate(
        self,
        prompts: Iterable[Prompt],
        *,
        sampling: Sampling | Sequence[Sampling] | None = None,
        n: int = 1,
        progress: Callable[[Output], None] | None = None,
        constraint: Constraint | Grammar | Sequence[Constraint | Grammar | None] | None = None,
        errors: str = "raise",
        options: Generation | None = None,
        **keywords: Unpack[SharedKeywords],
    ) -> list[Output]:
        """Run prompts to their ends, as many at once as there are slots. Returns outputs in the order of the prompts.

        Args:
            prompts: Texts, lists of token ids or lists of chat messages; or what a tokenizer returned for a batch.
            sampling: Settings for all prompts, or one per prompt. None takes those of `options`.
            n: Outputs per prompt; the outputs of one prompt follow each other. If a seed is given, the first output
                uses it, and each other output uses a seed derived from it and the output's number.
            progress: Called with each output as it ends.
            constraint: A constraint for all prompts, or one per prompt, of which None allows all tokens. By default
                that of `options`.
            errors: `raise` raises the error that ends a request and cancels the other requests. `return` puts the error
                into the request's output, and the other requests continue.
            options: What is asked of each request.
            keywords: Other fields of `Generation`; they override those of `options`.
        """
        generation = Generation.of(options, keywords)
        prompts, n = listed(prompts), whole("n", n)
        check_count(n, len(prompts))
        if errors not in ("raise", "return"):
            raise InputError(f"errors must be 'raise' or 'return', got {errors!r}")
        settings = one_each(generation.sampling if sampling is None else sampling, len(prompts), "samplings")
        rules = one_each(generation.constraint if constraint is None else constraint, len(prompts), "constraints")
        ids: list[str] = []
        steps: dict[str, list[Step]] = {}
        outputs: dict[str, Output] = {}
        try:
            for prompt, setting, rule in zip(prompts, settings, rules, strict=True):
                for k in range(n):
                    # mypy infers `object` for the type of a constraint.
                    for_sample = replace(generation, sampling=nth(setting, k), constraint=rule)  # type: ignore[arg-type]
                    ids.append(self._claimed(prompt, for_sample))
                    steps[ids[-1]] = []
            while len(outputs) < len(ids):
                for update in self._wait([id for id in ids if id not in outputs]):
                    if errors == "raise":
                        succeeded(update)
                    if update.step is not None:
                        steps[update.id].append(update.step)
                    if update.output is not None:
                        outputs[update.id] = replace(update.output, steps=steps[update.id], tokenizer=self.tokenizer)
                        if progress is not None:
                            progress(outputs[update.id])
        finally:
            self._leave(ids)
        return [outputs[id] for id in ids]

    @alone
    def swap(self, drafter: Drafter) -> None:
        """Use another drafter for new requests. Running requests keep theirs; with the last of them the old drafter is
        let go.

        The length policy keeps the costs of steps and their acceptance if the drafter differs in its weights alone.

        Raises:
            InputError: The drafter does not fit the other parts.
        """
        old = self.parts
        alike = type(drafter) is type(old.drafter) and shapes(drafter.modules) == shapes(old.drafter.modules)
        self.parts = self._fitting(drafter, old.experience if alike else Experience(due=True))
        if drafter is not old.drafter:
            # Ended requests would keep the old weights in memory, and their cache is of no use to the new ones.
            self._schedule.prefixes.forget(old.drafter)

    def refuses(self, drafter: Drafter) -> str | None:
        """Why a drafter does not fit the other parts, in one sentence; None if it does."""
        return None if self._refuses is None else self._refuses(replace(self.parts, drafter=drafter))

    def plain(self, *, keep_warm: bool = False) -> "Engine":
        """An engine over the same target that drafts nothing. Both use the target's slots, so it releases those that
        this engine keeps warm when it needs them, and one of the two runs at a time.

        Args:
            keep_warm: Whether it keeps slots of ended requests too, until somebody calls its `rest`.
        """
        self.rest()
        return Engine(
            replace(
                self.parts,
                drafter=NoDrafter(),
                tree=ChainTree(),
                verifier=self.parts.verifier if self._shares_noise else MatchVerifier(),
                length=FixedLength(),
                decoding=StepDecoding(),
            ),
            tokenizer=self.tokenizer,
            eos_ids=self.eos_ids,
            stop=self.stop,
            sampling=self.sampling,
            rules=self.rules,
            max_slots=self.max_slots,
            max_prefill_tokens=self.max_prefill_tokens,
            keep_warm=keep_warm,
            max_warm_slots=self.max_warm_slots,
            needs_seeds=self._needs_seeds,
            lender=self._lender or self,
        )

    @alone
    def rest(self) -> None:
        """Release the slots of ended requests, and forget their texts."""
        for drafter in (self.parts.drafter, *(drafter_of(state) for state in self._schedule.prefixes.states)):
            drafter.forget()
        self._schedule.prefixes.clear()

    @alone
    def _claimed(self, prompt: Prompt | Request, options: Generation, id: str | None = None) -> str:
        """Queue a request and open a mailbox for its updates."""
        id = self.add(prompt, id=id, options=options)
        self._mail.claim(id)
        return id

    @alone
    def _wait(self, ids: Sequence[str]) -> list[Update]:
        """Updates of claimed requests: unread ones from other callers' steps, otherwise those of a new step."""
        updates = [update for id in ids for update in self._mail.take(id)]
        if not updates:
            self._advance()
            updates = [update for id in ids for update in self._mail.take(id)]
        return updates

    @alone
    def _leave(self, ids: Sequence[str]) -> None:
        """Cancel those claimed requests that still run, and drop their mailboxes."""
        for id in ids:
            self._mail.disown(id)
            self.cancel(id)

    def _advance(self) -> None:
        """One step of all requests; the updates go into the mailboxes."""
        route = None if self.route is None else self._routed
        self._schedule.advance(self.max_prefill_tokens, self.dice, self.watch, route)
        if self.between is not None:
            self.between()
        if self._measure is not None and self.parts.experience.stale and not self._schedule.seats:
            self._schedule.prefixes.clear()
            self.parts = replace(self.parts, experience=self._measure(self.parts))

    def _routed(self, request: Request) -> Drafter:
        """The drafter that `route` chooses, if it fits the other parts."""
        drafter = self.parts.drafter if self.route is None else self.route(request)
        return drafter if drafter is self.parts.drafter else self._fitting(drafter, self.parts.experience).drafter

    def _fitting(self, drafter: Drafter, experience: Experience) -> Parts:
        """The parts with another drafter. Raises InputError if it does not fit them."""
        parts = replace(self.parts, drafter=drafter, experience=experience)
        if (reason := self.refuses(drafter)) is not None:
            raise InputError(reason)
        return parts
