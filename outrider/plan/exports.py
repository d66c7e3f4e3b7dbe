"""What other engines take: their draft lengths, as flags and tables, for the drafter that a plan advises."""

import json
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise

from outrider import catalog
from outrider.core.inputs import InputError, unknown
from outrider.plan.prediction import Prediction, ranked
from outrider.plan.verdict import Advice

ENGINES = ("vllm", "sglang", "llama.cpp")
VLLM = {
    "model": "draft_model",
    **{
        name: name
        for name in ("ngram", "suffix", "eagle", "eagle3", "medusa", "mlp_speculator", "dflash", "dspark", "mtp")
    },
}
"""vLLM's name for each drafter."""
SGLANG = {
    "model": "STANDALONE",
    "eagle": "EAGLE",
    "eagle3": "EAGLE3",
    "mtp": "NEXTN",
    "ngram": "NGRAM",
}
LLAMA = {
    "model": "draft-simple",
    "eagle3": "draft-eagle3",
    "dflash": "draft-dflash",
    "dspark": "draft-dspark",
    "mtp": "draft-mtp",
    "ngram": "ngram-simple",
}


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
        best = [_best_chain(found).way for _, found in sorted(advice.by_requests.items())]
        drafter = next((way.drafter for way in best if not way.is_plain), "none")
    if drafter == "none":
        return ""
    lengths = {b: _best_chain(found, drafter).way.length for b, found in sorted(advice.by_requests.items())}
    name, path = _named(drafter)
    names: Mapping[str, str] = {"vllm": VLLM, "sglang": SGLANG, "llama.cpp": LLAMA}[engine]
    if name not in names:
        raise InputError(f"{engine} has no drafter like {name!r}; it has those of {', '.join(names)}")
    return {"vllm": _vllm, "sglang": _sglang, "llama.cpp": _llama}[engine](names[name], path, lengths)


def batch_table(lengths: Mapping[int, int]) -> list[list[int]]:
    """Draft lengths by ranges of batch sizes, both ends included, as vLLM reads them: the first begins at 1.

    Example:
        >>> batch_table({1: 4, 2: 4, 8: 2, 16: 0})
        [[1, 7, 4], [8, 15, 2], [16, 16, 0]]
    """
    sizes = sorted(lengths)
    ends = [*(after - 1 for _, after in pairwise(sizes)), sizes[-1]]
    found: list[list[int]] = []
    for size, end in zip(sizes, ends, strict=True):
        if found and found[-1][2] == lengths[size]:
            found[-1][1] = end
        else:
            found.append([1 if not found else size, end, lengths[size]])
    return found


def _best_chain(found: Sequence[Prediction], drafter: str | None = None) -> Prediction:
    chains = [
        each
        for each in found
        if each.way.is_plain or (each.way.tree == "chain" and drafter in (None, each.way.drafter))
    ]
    return ranked(chains)[0]


def _named(drafter: str) -> tuple[str, str | None]:
    """The catalog's name of a drafter, and the path of its weights."""
    made = catalog.make("drafter", drafter)
    path = getattr(made, "path", None)
    return catalog.name_of(made), None if path is None else str(path)


def _vllm(method: str, path: str | None, lengths: Mapping[int, int]) -> str:
    longest = max(lengths.values())
    config = {
        "method": method,
        **({} if path is None else {"model": path}),
        "num_speculative_tokens": longest,
        "num_speculative_tokens_per_batch_size": batch_table(lengths),
        # Its default drafts greedily, which accepts less above temperature 0.
        **({} if method in ("ngram", "suffix") else {"draft_sample_method": "probabilistic"}),
    }
    return f"--speculative-config {shlex.quote(json.dumps(config))}"


def _sglang(algorithm: str, path: str | None, lengths: Mapping[int, int]) -> str:
    length = next(iter(lengths.values())) or max(lengths.values())
    flags = ["--speculative-algorithm", algorithm]
    if algorithm == "NGRAM":
        return shlex.join([*flags, "--speculative-num-draft-tokens", str(length + 1)])
    flags += [] if path is None else ["--speculative-draft-model-path", path]
    steps = ["--speculative-num-steps", str(length), "--speculative-eagle-topk", "1"]
    return shlex.join([*flags, *steps, "--speculative-num-draft-tokens", str(length + 1)])


def _llama(kind: str, path: str | None, lengths: Mapping[int, int]) -> str:
    length = next(iter(lengths.values())) or max(lengths.values())
    flags = ["--spec-type", kind, "--spec-draft-n-max", str(length)]
    return shlex.join([*([] if path is None else ["-md", path]), *flags])
