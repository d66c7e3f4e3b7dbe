"""Why a head drafts badly: its files beside the target, and other ways to read them, tried on what the target says."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from outrider import catalog
from outrider.core.types import InputError, Sampling
from outrider.engine.engine import Engine
from outrider.engine.prompts import Prompt
from outrider.heads.doubt import Doubt
from outrider.heads.head import Head, TrainedHead
from outrider.heads.objective import HeadContext
from outrider.heads.parts.layer_config import rotary_base
from outrider.learning.batch import Document, TrainBatch
from outrider.lm.hf.anatomy import Anatomy
from outrider.lm.hf.open import open_tokenizer
from outrider.lm.hf.taps import tapped
from outrider.lm.target_info import TargetInfo
from outrider.training.data.batches import Batches
from outrider.training.loop import journal
from outrider.training.loop.steps import FOLDER

DEPTH = 3
"""Draft tokens of the steps that are judged."""
NEW_TOKENS = 48
"""Tokens that the target adds to each prompt."""
LEAST_GAIN, SURE = 0.08, 4.0
"""A way to read a head is better if steps have so many more tokens, and so many standard errors more."""
MOST_CAUSES = 3
"""Most causes that are looked for by trying."""
COVERED = 0.9
"""The least share of the target's tokens that a head should be able to guess."""
CLOSE = 0.05
"""Relative distance below which two tables are copies of each other, rounded otherwise."""
REACHED = 0.8
"""The least share of the trainer's draft tokens per step that a head should reach here."""
FLAGS = ("norm_before_residual", "norm_output", "causal", "sample_from_anchor", "shift_label")
"""Questions that a user answers by true or false."""
TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something about a head that may lower its acceptance.

    Attributes:
        about: What it is about.
        sentence: What is wrong, and what to do.
    """

    about: str
    sentence: str


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What was found about a head.

    Attributes:
        head: Where it lies.
        kind: Its name in the catalog; None if it has none.
        depth: Draft tokens of the steps that were judged.
        tokens_per_step: Tokens of a step at temperature 1 along what the target said; None if that was not measured.
        best: The same with the causes removed that were found by trying.
        findings: What was found.
    """

    head: str
    kind: str | None
    depth: int = DEPTH
    tokens_per_step: float | None = None
    best: float | None = None
    findings: Sequence[Finding] = ()

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Judge:
    """What the target said, with all its hidden states: how good any reading of a head is along it.

    Attributes:
        model: The target.
        tokenizer: Its tokenizer; None if there is none.
        batch: The texts.
        documents: The same, text by text.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    batch: TrainBatch
    documents: Sequence[Document]

    @classmethod
    def listening(cls, engine: Engine, prompts: Sequence[Prompt], *, max_new_tokens: int = NEW_TOKENS) -> "Judge":
        """Let the target continue prompts at temperature 1.

        Raises:
            InputError: The target is no transformers model, or its hidden states cannot be read.
        """
        model = getattr(engine.parts.target, "model", None)
        if not isinstance(model, PreTrainedModel):
            raise InputError("the doctor examines heads of transformers models, and this target is none")
        begun = [engine.encode(prompt) for prompt in prompts]
        samplings = [Sampling(temperature=1.0, seed=i) for i in range(len(begun))]
        outputs = engine.plain().generate(begun, max_new_tokens=max_new_tokens, sampling=samplings)
        documents = [
            Document(tokens=np.array([*prompt, *output.tokens]), start=len(prompt))
            for prompt, output in zip(begun, outputs, strict=True)
            if len(output.tokens) > DEPTH + 1
        ]
        if not documents:
            raise InputError("the target ends every text at once; give other texts with --text")
        longest = max(len(each.tokens) for each in documents)
        batch = Batches(documents, batch_size=len(documents), max_length=longest, seed=0).batch(0).to(model.device)
        anatomy = Anatomy.of(model)
        if anatomy.layers is None:
            raise InputError("this target shows no hidden states, so it can have no head")
        with torch.no_grad(), tapped(anatomy.layers, range(anatomy.num_layers + 1)) as seen:
            model.base_model(input_ids=batch.tokens, use_cache=False)
        return cls(
            model=model,
            tokenizer=engine.tokenizer,
            batch=replace(batch, hidden=dict(seen)),
            documents=documents,
        )

    @cached_property
    def context(self) -> HeadContext:
        """The target, for a head that learns."""
        return HeadContext(target=self.model, tokenizer=self.tokenizer, documents=self.documents, depth=DEPTH)

    def tokens(self, head: Head, trained: TrainedHead) -> Float[np.ndarray, " places"] | None:
        """Tokens of the steps that begin at each place; None for heads that are not trained here."""
        spec = trained.spec
        if spec.objective is None or spec.options is None:
            return None
        objective = spec.objective(head.float().eval(), spec.options(), self.context)
        with torch.no_grad():
            judged = objective.eval().judged(self.batch, DEPTH)
        accepted = np.exp(np.cumsum(np.minimum(judged.log_ratios.astype(np.float64), 0), 1))
        num_tokens: Float[np.ndarray, " places"] = 1 + accepted.sum(1)
        return num_tokens


def examine(place: str, judge: Judge) -> Examination:
    """Examine a head: its files, and other ways to read them.

    Args:
        place: Its directory or hub id, with answers to what its files leave open.
        judge: What its target says.

    Raises:
        InputError: There is no drafter, or it is no head.
    """
    trained = catalog.make("drafter", place)
    if not isinstance(trained, TrainedHead):
        raise InputError(f"{place} holds no head; for other drafters use --drafter")
    info, kind = judge.context.info, catalog.name_of(trained)
    beside = [*_templates(trained, judge)]
    try:
        readings = list(_readings(trained, info, judge.tokenizer))
    except InputError as error:
        refused = Finding(about="files", sentence=_sentence(str(error)))
        return Examination(head=place, kind=kind, findings=[refused, *beside])
    measured = [(answers, judge.tokens(head, trained), head) for head, answers in readings]
    answers, tokens, head = max(measured, key=lambda each: 0.0 if each[1] is None else float(each[1].mean()))
    findings = [*_questions(measured, answers), *_of_files(trained, head, judge, info), *beside]
    if tokens is None:
        return Examination(head=place, kind=kind, findings=findings)
    causes, best = _causes(head, trained, judge, info, tokens)
    tried = {each.about for each in causes}
    findings = [*causes, *(each for each in findings if each.about not in tried)]
    findings += _of_training(trained, float(tokens.mean()))
    return Examination(head=place, kind=kind, tokens_per_step=float(tokens.mean()), best=best, findings=findings)


def _readings(
    trained: TrainedHead, info: TargetInfo, tokenizer: PreTrainedTokenizerBase | None, answered: int = 0
) -> Iterator[tuple[Head, TrainedHead]]:
    """The head with every answer to what its files leave open. Raises InputError if it cannot be read."""
    try:
        head = trained.spec.head.load(trained.checkpoint, info, trained)
    except InputError as error:
        answers = list(_answers(trained, str(error), tokenizer))
        if not answers or answered == len(FLAGS):
            raise
        refusals = []
        for each in answers:
            try:
                yield from _readings(each, info, tokenizer, answered + 1)
            except InputError as refusal:
                refusals.append(refusal)
        if len(refusals) == len(answers):
            raise
        return
    yield head, trained


def with_answer(trained: TrainedHead, name: str, value: object) -> TrainedHead:
    """The same head, told one thing more."""
    answer: dict[str, Any] = {name: value}
    return replace(trained, **answer)


def _answers(trained: TrainedHead, question: str, tokenizer: PreTrainedTokenizerBase | None) -> Iterator[TrainedHead]:
    """The head with the answers that a refusal asks for."""
    open_ones = {each.name for each in fields(trained) if getattr(trained, each.name) is None}
    for name in FLAGS:
        if name in open_ones and f"{name}=" in question:
            yield from (with_answer(trained, name, value) for value in (True, False))
            return
    if "taps" in open_ones and (choices := re.findall(r"taps=(\d[\dx]*)", question)):
        yield from (with_answer(trained, "taps", tuple(map(int, each.split("x")))) for each in choices)
    elif "mask_token_id" in open_ones and "mask_token_id=" in question and tokenizer is not None:
        ids = (tokenizer.mask_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
        yield from (with_answer(trained, "mask_token_id", each) for each in sorted({i for i in ids if i is not None}))


def _questions(
    measured: Sequence[tuple[TrainedHead, Float[np.ndarray, " places"] | None, Head]], best: TrainedHead
) -> Iterator[Finding]:
    """What the files leave open, and the answer under which the head drafts best."""
    if len(measured) < 2:
        return
    others = [each for each, _, _ in measured if each != best]
    every = [each.name for each in fields(best)]
    names = [name for name in every if any(getattr(best, name) != getattr(other, name) for other in others)]
    answer = ",".join(f"{name}={_text(getattr(best, name))}" for name in names)
    figures = [float(tokens.mean()) for _, tokens, _ in measured if tokens is not None]
    if not figures:
        yield Finding(about="questions", sentence=f"The files leave open {' and '.join(names)}; ask who trained it.")
        return
    yield Finding(
        about="questions",
        sentence=f"The files leave open {' and '.join(names)}; with {answer} a step has {max(figures):.2f} tokens, and "
        f"with the worst answer {min(figures):.2f}. Add {answer} behind the path.",
    )


def _causes(
    head: Head, trained: TrainedHead, judge: Judge, info: TargetInfo, tokens: Float[np.ndarray, " places"]
) -> tuple[list[Finding], float]:
    """The doubts under which the head drafts clearly better, the best one first, each on top of those before it."""
    findings: list[Finding] = []
    held: list[Doubt] = []
    while len(held) < MOST_CAUSES:
        doubts = _doubts(head, info, held)
        tried = [(each, _tried(head, trained, judge, each)) for each in doubts]
        better = [(each, after) for each, after in tried if after is not None and _is_better(after, tokens)]
        if not better:
            break
        doubt, after = max(better, key=lambda each: float(each[1].mean()))
        findings.append(
            Finding(
                about=doubt.about,
                sentence=_sentence(
                    f"{doubt.means}: without that a step has {float(after.mean()):.2f} tokens and not "
                    f"{float(tokens.mean()):.2f}; {doubt.advice}"
                ),
            )
        )
        held.append(doubt)
        tokens = after
        for each, name, value in doubt.changes:
            setattr(each, name, value)
    return findings, float(tokens.mean())


def _doubts(head: Head, info: TargetInfo, held: Sequence[Doubt]) -> list[Doubt]:
    about = {each.about for each in held}
    return [each for each in head.doubts(info) if each.about not in about]


def _tried(head: Head, trained: TrainedHead, judge: Judge, doubt: Doubt) -> Float[np.ndarray, " places"] | None:
    """Tokens of the steps under a doubt; None if the head does not run so."""
    with doubt.held():
        try:
            return judge.tokens(head, trained)
        except InputError:
            return None


def _is_better(after: Float[np.ndarray, " places"], before: Float[np.ndarray, " places"]) -> bool:
    """Whether steps have clearly more tokens. Both were judged at the same places."""
    gains = after - before
    gain, error = float(gains.mean()), float(gains.std() / max(1, len(gains)) ** 0.5)
    return gain > LEAST_GAIN and gain > SURE * error


def _of_files(trained: TrainedHead, head: Head, judge: Judge, info: TargetInfo) -> Iterator[Finding]:
    """What the files say that does not fit the target."""
    config, tensors = trained.checkpoint.config, trained.checkpoint.tensors()
    yield from _dtypes(config, tensors, info)
    yield from _map(tensors, head, judge)
    yield from _copies(tensors, info)
    yield from _layers(head, info)
    yield from _masks(config, head, judge)


def _dtypes(config: Mapping[str, Any], tensors: Mapping[str, Tensor], info: TargetInfo) -> Iterator[Finding]:
    declared = config.get("torch_dtype") or config.get("dtype")
    kinds = {str(each.dtype).removeprefix("torch.") for each in tensors.values() if each.is_floating_point()}
    if isinstance(declared, str) and kinds != {declared}:
        yield Finding(
            about="dtype",
            sentence=f"Its config says {declared}, and its tensors are {' and '.join(sorted(kinds))}: they were "
            "converted after training; get the tensors that the trainer wrote.",
        )
    elif info.dtype not in {each.dtype for each in tensors.values()} and "float16" in kinds:
        yield Finding(
            about="dtype",
            sentence=f"Its tensors are float16 and the target computes in {str(info.dtype).removeprefix('torch.')}; "
            "large values do not fit in float16, so load the head with dtype=float32 behind its path.",
        )


def _map(tensors: Mapping[str, Tensor], head: Head, judge: Judge) -> Iterator[Finding]:
    """The list of tokens that it can guess."""
    offsets, kept = tensors.get("d2t"), tensors.get("t2d")
    if offsets is not None and kept is not None and offsets.dim() == kept.dim() == 1:
        ids = torch.arange(len(offsets)) + offsets.long()
        listed = kept.nonzero()[:, 0]
        if not torch.equal(ids.sort().values, listed):
            yield Finding(
                about="vocabulary map",
                sentence=f"Its two lists of tokens contradict each other: d2t names {len(ids)} tokens and t2d "
                f"{len(listed)}, and {int(torch.isin(ids, listed).sum())} are the same; the map is older or newer than "
                "the weights, so get both from one run.",
            )
    guessed = getattr(head, "ids", None)
    if guessed is None:
        return
    output_tokens = np.concatenate([each.tokens[each.start :] for each in judge.documents])
    share = float(np.isin(output_tokens, guessed.cpu().numpy()).mean())
    if share < COVERED:
        yield Finding(
            about="vocabulary",
            sentence=f"It can guess {len(guessed)} tokens, and {share:.0%} of what the target says here are among "
            "them; train it with a draft vocabulary that is counted on such texts, or with a larger one.",
        )


@torch.no_grad()
def _copies(tensors: Mapping[str, Tensor], info: TargetInfo) -> Iterator[Finding]:
    """Copies of the target's embedding and output layer."""
    ends = info.embedding_and_head()
    table = next((each for name, each in tensors.items() if name.endswith("embed_tokens.weight")), None)
    if table is not None and table.dim() == 2 and table.shape[1] == info.hidden_size:
        ids = torch.arange(min(len(table), info.vocab_size), device=info.device)
        distance = _distance(table[: len(ids)], ends.embed(ids))
        if distance > CLOSE:
            yield Finding(
                about="embedding",
                sentence=f"Its embedding is not the target's (they differ by {distance:.0%} of the target's size): "
                "unless it was trained with the head, the head is of another target or of another version of it; take "
                "the head of this one.",
            )
    output = tensors.get("verifier_lm_head.weight")
    if output is not None and output.shape[-1] == info.hidden_size:
        states = torch.randn(8, info.hidden_size, generator=torch.Generator().manual_seed(0)).to(info.device)
        theirs = ends.logits(states).float().cpu()
        ours = states.cpu() @ output.float().T
        width = min(ours.shape[1], theirs.shape[1])
        if ours.shape[1] >= info.vocab_size and _distance(ours[:, :width], theirs[:, :width]) > CLOSE:
            yield Finding(
                about="output layer",
                sentence="Its copy of the target's output layer is not this target's: the head was trained on another "
                "target or on another version of it; take the head of this one.",
            )


def _distance(one: Tensor, other: Tensor) -> float:
    one, other = one.float().cpu(), other.float().cpu()
    return float((one - other).norm() / other.norm().clamp_min(1e-9))


def _layers(head: Head, info: TargetInfo) -> Iterator[Finding]:
    """Rotary positions and the longest context."""
    config: Any = getattr(head, "config", None)
    layers = config if isinstance(config, PreTrainedConfig) else getattr(config, "layers", None)
    if not isinstance(layers, PreTrainedConfig) or info.config is None:
        return
    head_base, target_base = rotary_base(layers), rotary_base(info.config)
    if head_base is not None and target_base is not None and head_base != target_base:
        yield Finding(
            about="rotary base",
            sentence=f"Its rotary base is {head_base:g} and the target's is {target_base:g}; on these texts that makes "
            "no clear difference, so ask who trained it which one it was trained with.",
        )
    longest = getattr(layers, "max_position_embeddings", None)
    if isinstance(longest, int) and longest < info.max_context:
        yield Finding(
            about="context",
            sentence=f"It was made for {longest} positions and the target has {info.max_context}; say "
            f"max_context={longest} behind its path, so that nothing is drafted beyond.",
        )


def _masks(config: Mapping[str, Any], head: Head, judge: Judge) -> Iterator[Finding]:
    """The token that stands for an unknown one, and the size of a block."""
    sizes: Any = getattr(head, "config", None)
    mask = getattr(sizes, "mask_id", None)
    text_tokens = np.concatenate([each.tokens for each in judge.documents])
    if mask is not None and (count := int((text_tokens == mask).sum())):
        token = judge.tokenizer.convert_ids_to_tokens(mask) if judge.tokenizer is not None else mask
        yield Finding(
            about="mask token",
            sentence=f"Its mask token {mask} ({token!r}) stands {count} times in texts of the target, and heads are "
            "trained with a token that no text has; ask who trained it, and write the right mask_token_id.",
        )
    block = getattr(sizes, "block_size", None)
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    drafted = methods[0].get("speculative_tokens") if isinstance(methods[0], Mapping) else None
    if isinstance(block, int) and isinstance(drafted, int) and drafted not in (block, block - 1):
        yield Finding(
            about="block size",
            sentence=f"Its block has {block} positions, and its config drafts {drafted} tokens: one of the two is not "
            "what it was trained with; ask who trained it.",
        )


def _templates(trained: TrainedHead, judge: Judge) -> Iterator[Finding]:
    """The chat template and the tokenizer beside the head."""
    folder = Path(trained.path)
    if judge.tokenizer is None or not folder.is_dir():
        return
    file, whole = folder / TEMPLATE, any(folder.glob("tokenizer.*"))
    tokenizer = None
    if whole:
        tokenizer = open_tokenizer(str(folder))
        if tokenizer is not None and tokenizer.get_vocab() != judge.tokenizer.get_vocab():
            yield Finding(
                about="tokenizer",
                sentence="The tokenizer beside it is not the target's: the head was trained on another target; take "
                "the head of this one.",
            )
    template = file.read_text(encoding="utf-8") if file.is_file() else getattr(tokenizer, "chat_template", None)
    if template is not None and template.strip() != (judge.tokenizer.chat_template or "").strip():
        yield Finding(
            about="chat template",
            sentence="The chat template beside it is not the target's: the head was trained on chats of another form; "
            "train it further on chats of the target's form, or give the target its template.",
        )


def _of_training(trained: TrainedHead, tokens: float) -> Iterator[Finding]:
    """What its trainer measured."""
    watched = [each for each in journal.read(Path(trained.path) / FOLDER / "log.jsonl") if each.get("kind") == "watch"]
    reached = [1 + sum(each["accepted"][:DEPTH]) for each in watched if len(each.get("accepted", ())) >= DEPTH]
    if reached and tokens - 1 < REACHED * (max(reached) - 1):
        yield Finding(
            about="training",
            sentence=f"Its trainer measured {max(reached):.2f} tokens per step of {DEPTH} draft tokens, and here a "
            f"step has {tokens:.2f}: it learnt other texts, or its files were changed; train it further on such texts.",
        )


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}".rstrip(".") + "."
