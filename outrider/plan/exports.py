"""What other engines take: their draft lengths, as flags and tables, for the drafter that a plan advises."""

import json
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise

from outrider import catalog
from outrider.core.inputs import InputError, unknown
from outrider.drafters.exports import Exports
from outrider.drafters.traits import exports_of
from outrider.plan.prediction import PlanPrediction, ranked
from outrider.plan.verdict import Advice

ENGINES = ("vllm", "sglang", "llama.cpp")
"""Those whose flags are known here."""


def exported(advice: Advice, engine: str) -> str:
    """The options of an engine, as they are written on its command line; empty if it should not speculate.

    The engine runs chains of one drafter: that of the best chain for the smallest number of requests for which drafts
    pay. Costs are those of this machine.

    Raises:
        InputError: The engine is not known, or does not have the drafter.
    """
    if engine not in ENGINES:
        raise unknown("engine", engine, ENGINES)
    first = min(advice.by_requests)
    drafter = _best_chain(advice.by_requests[first]).way.drafter
    if drafter == "none":
        best = [_best_chain(predictions).way for _, predictions in sorted(advice.by_requests.items())]
        drafter = next((way.drafter for way in best if not way.is_plain), "none")
    if drafter == "none":
        return ""
    lengths = {b: _best_chain(predictions, drafter).way.length for b, predictions in sorted(advice.by_requests.items())}
    name, path = _named(drafter)
    known = {each: exports_of(row.kind) for each, row in catalog.rows("drafter").items()}
    method = known[name].method(engine)
    if method is None:
        able = ", ".join(each for each, exports in known.items() if exports.method(engine))
        raise InputError(f"{engine} has no drafter like {name!r}; it has those of {able}")
    if engine == "vllm":
        return _vllm(method, path, lengths, known[name])
    return {"sglang": _sglang, "llama.cpp": _llama}[engine](method, path, lengths)


def batch_table(lengths: Mapping[int, int]) -> list[list[int]]:
    """Draft lengths by ranges of batch sizes, both ends included, as vLLM reads them: the first begins at 1.

    Example:
        >>> batch_table({1: 4, 2: 4, 8: 2, 16: 0})
        [[1, 7, 4], [8, 15, 2], [16, 16, 0]]
    """
    sizes = sorted(lengths)
    ends = [*(after - 1 for _, after in pairwise(sizes)), sizes[-1]]
    ranges: list[list[int]] = []
    for size, end in zip(sizes, ends, strict=True):
        if ranges and ranges[-1][2] == lengths[size]:
            ranges[-1][1] = end
        else:
            ranges.append([1 if not ranges else size, end, lengths[size]])
    return ranges


def _best_chain(predictions: Sequence[PlanPrediction], drafter: str | None = None) -> PlanPrediction:
    chains = [
        each
        for each in predictions
        if each.way.is_plain or (each.way.tree == "chain" and drafter in (None, each.way.drafter))
    ]
    return ranked(chains)[0]


def _named(drafter: str) -> tuple[str, str | None]:
    """The catalog's name of a drafter, and the path of its weights."""
    configured = catalog.make("drafter", drafter)
    path = getattr(configured, "path", None)
    return catalog.name_of(configured), None if path is None else str(path)


def _vllm(method: str, path: str | None, lengths: Mapping[int, int], exports: Exports) -> str:
    config = {
        "method": method,
        **({} if path is None else {"model": path}),
        "num_speculative_tokens": max(lengths.values()),
        "num_speculative_tokens_per_batch_size": batch_table(lengths),
        # Its default drafts greedily, which accepts less above temperature 0.
        **({"draft_sample_method": "probabilistic"} if exports.draws else {}),
        **exports.options,
    }
    return f"--speculative-config {shlex.quote(json.dumps(config))}"


def _sglang(algorithm: str, path: str | None, lengths: Mapping[int, int]) -> str:
    return shlex.join(sglang_flags(algorithm, next(iter(lengths.values())) or max(lengths.values()), path))


def sglang_flags(algorithm: str, length: int, path: str | None) -> list[str]:
    """SGLang's flags for chains.

    Args:
        length: Draft tokens of a step.
        path: The drafter's folder; None where it has none.
    """
    flags = ["--speculative-algorithm", algorithm]
    flags += [] if path is None else ["--speculative-draft-model-path", path]
    if algorithm == "DSPARK":
        return [*flags, "--speculative-dspark-block-size", str(length)]
    if algorithm not in ("NGRAM", "DFLASH"):
        flags += ["--speculative-num-steps", str(length), "--speculative-eagle-topk", "1"]
    # The anchor counts as one.
    return [*flags, "--speculative-num-draft-tokens", str(length + 1)]


def _llama(kind: str, path: str | None, lengths: Mapping[int, int]) -> str:
    length = next(iter(lengths.values())) or max(lengths.values())
    flags = ["--spec-type", kind, "--spec-draft-n-max", str(length)]
    return shlex.join([*([] if path is None else ["-md", path]), *flags])
