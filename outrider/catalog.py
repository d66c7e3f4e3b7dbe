"""Every method by name: its class, its paper, its guarantee. The one place where a string becomes an object.

A method is imported when it is needed.
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from outrider.core.inputs import InputError, field_values, unknown
from outrider.core.place import GGUF
from outrider.core.row import LEVIATHAN, Family, Row

ROWS = (
    Row(family="drafter", name="none", home="outrider.drafters.none:NoDrafter", summary="plain decoding", source="-"),
    Row(
        family="drafter",
        name="ngram",
        home="outrider.drafters.ngram:NgramDrafter",
        summary="continue the longest, most recent match of the context's end",
        source="Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding",
    ),
    Row(
        family="drafter",
        name="suffix",
        home="outrider.drafters.suffix:SuffixDrafter",
        summary="continue a repeated suffix, by suffix automata of context, ended requests and corpus",
        source="Oliaro et al. 2024, SuffixDecoding, https://arxiv.org/abs/2411.04975",
    ),
    Row(
        family="drafter",
        name="model",
        home="outrider.drafters.model:ModelPath",
        summary="a smaller LM; its tokenizer may differ",
        source=LEVIATHAN,
        bound=("outrider.drafters.model:ModelDrafter",),
    ),
    Row(
        family="drafter",
        name="first",
        home="outrider.drafters.first:FirstOf",
        summary="copy where the match promises more than the last drafter, otherwise let that one draft",
        source="ik_llama.cpp 2026, stages of speculators, https://github.com/ikawrakow/ik_llama.cpp",
        bound=("outrider.drafters.first:FirstDrafter",),
    ),
    Row(
        family="drafter",
        name="union",
        home="outrider.drafters.union:UnionOf",
        summary="copy and draft in each step, in one tree",
        source="SpecInfer 2023, trees of several drafters, https://arxiv.org/abs/2305.09781",
        bound=("outrider.drafters.union:UnionDrafter",),
    ),
    Row(
        family="drafter",
        name="steered",
        home="outrider.drafters.steered:SteeredPath",
        summary="a smaller LM that the target's hidden states steer",
        source="Berdoz et al. 2025, SD², https://arxiv.org/abs/2511.09844",
        bound=("outrider.drafters.steered:SteeredDrafter",),
    ),
    Row(
        family="drafter",
        name="blockwise",
        home="outrider.heads.blockwise:SPEC",
        summary="small heads on the target's last hidden state; a small LM or an n-gram model may refine their draft",
        source="Stern et al. 2018, https://arxiv.org/abs/1811.03115; Kim et al. 2024, https://arxiv.org/abs/2404.09221",
    ),
    Row(
        family="drafter",
        name="mtp",
        home="outrider.heads.mtp:MtpPath",
        summary="the multi-token-prediction layers in the target's own checkpoint",
        source="DeepSeek-AI 2024, DeepSeek-V3, https://arxiv.org/abs/2412.19437",
        bound=("outrider.heads.mtp:MtpDrafter", "outrider.heads.mtp:MtpLayersDrafter"),
    ),
    Row(
        family="drafter",
        name="assistant",
        home="outrider.heads.assistant:SPEC",
        summary="the assistant that was published with a target: Gemma 4's or Muse Glimmer's",
        source="Google 2026, https://huggingface.co/docs/transformers/model_doc/gemma4_assistant",
    ),
    Row(
        family="drafter",
        name="medusa",
        home="outrider.heads.medusa:SPEC",
        summary="heads that each guess one depth from the target's last hidden state",
        source="Cai et al. 2024, Medusa, https://arxiv.org/abs/2401.10774",
    ),
    Row(
        family="drafter",
        name="hydra",
        home="outrider.heads.hydra:SPEC",
        summary="medusa heads that read the draft tokens before; with a prefix layer it is Hydra++",
        source="Ankner et al. 2024, Hydra, https://arxiv.org/abs/2402.05109",
    ),
    Row(
        family="drafter",
        name="mlp_speculator",
        home="outrider.heads.mlp_speculator:SPEC",
        summary="a recurrent state that reads the target's last state, then the draft token by token",
        source="Wertheimer et al. 2024, https://arxiv.org/abs/2404.19124",
    ),
    Row(
        family="drafter",
        name="eagle",
        home="outrider.heads.eagle:SPEC",
        summary="a layer that continues the target's last features; with tree `dynamic` it is EAGLE-2",
        source="Li et al. 2024, EAGLE, https://arxiv.org/abs/2401.15077",
    ),
    Row(
        family="drafter",
        name="eagle3",
        home="outrider.heads.eagle3:SPEC",
        summary="a layer that continues three fused hidden states of the target",
        source="Li et al. 2025, EAGLE-3, https://arxiv.org/abs/2503.01840",
    ),
    Row(
        family="drafter",
        name="poss",
        home="outrider.heads.poss:SPEC",
        summary="eagle or eagle3 with a specialist for each part of a draft",
        source="Huang et al. 2025, PosS, https://arxiv.org/abs/2506.03566",
    ),
    Row(
        family="drafter",
        name="griffin",
        home="outrider.heads.griffin:SPEC",
        summary="eagle with a fusion that the token guides, and a guess apart from the feature",
        source="Hu et al. 2025, GRIFFIN, https://arxiv.org/abs/2502.11018",
    ),
    Row(
        family="drafter",
        name="jakiro",
        home="outrider.heads.jakiro:SPEC",
        summary="eagle with two small experts, whose contrast guesses the deepest tokens without a forward",
        source="Huang et al. 2025, Jakiro, https://arxiv.org/abs/2502.06282",
    ),
    Row(
        family="drafter",
        name="parallel",
        home="outrider.heads.parallel:SPEC",
        summary="a layer that guesses all tokens of a draft in one forward, at learnt mask slots",
        source="ParallelSpec 2024, https://arxiv.org/abs/2410.05589",
    ),
    Row(
        family="drafter",
        name="dflash",
        home="outrider.heads.dflash:SPEC",
        summary="a head that guesses a block of tokens in one forward, each without the others",
        source="DFlash 2026, https://arxiv.org/abs/2602.06036",
    ),
    Row(
        family="drafter",
        name="jetspec",
        home="outrider.heads.jetspec:SPEC",
        summary="dflash whose guesses see no later position of their block",
        source="JetSpec 2026, https://arxiv.org/abs/2606.18394",
    ),
    Row(
        family="drafter",
        name="dflare",
        home="outrider.heads.dflare:SPEC",
        summary="dflash with a mixture of the target's layers for each layer of the head",
        source="Tencent 2026, https://github.com/Tencent/AngelSlim",
    ),
    Row(
        family="drafter",
        name="dspark",
        home="outrider.heads.dspark:SPEC",
        summary="dflash with a sequential head that corrects each guess by the token before it",
        source="DeepSeek 2026, https://arxiv.org/abs/2607.05147",
    ),
    Row(
        family="drafter",
        name="domino",
        home="outrider.heads.domino:SPEC",
        summary="dflash with a recurrent layer over the drafted tokens; tree `dynamic` scores paths as DARTree does",
        source="Domino 2026, https://arxiv.org/abs/2605.29707",
    ),
    Row(
        family="drafter",
        name="dflash2",
        home="outrider.heads.dflash2:SPEC",
        summary="dflash with convolutions in the block, and a choice among the likeliest tokens by the token before",
        source="z-lab 2026, https://github.com/z-lab/dflash",
    ),
    Row(
        family="drafter",
        name="xpress",
        home="outrider.heads.xpress:SPEC",
        summary="dflash with a small refiner that corrects each guess by all drafted tokens before it",
        source="XPress 2026, https://arxiv.org/abs/2608.02438",
    ),
    Row(
        family="tree",
        name="chain",
        home="outrider.trees.chain:ChainTree",
        summary="one child per node",
        source=LEVIATHAN,
    ),
    Row(
        family="tree",
        name="iid",
        home="outrider.trees.iid:IidTree",
        summary="independent paths, repeated draws kept or, with dedup, dropped",
        source="Miao et al. 2023, SpecInfer, https://arxiv.org/abs/2305.09781",
    ),
    Row(
        family="tree",
        name="gumbel",
        home="outrider.trees.gumbel:GumbelTree",
        summary="children drawn without replacement, a fixed number per depth",
        source="Jeon et al. 2024, RSD-C, https://arxiv.org/abs/2402.14160",
    ),
    Row(
        family="tree",
        name="beam",
        home="outrider.trees.beam:BeamTree",
        summary="stochastic beam: sequences drawn without replacement, a fixed number per level",
        source="Jeon et al. 2024, RSD-S, https://arxiv.org/abs/2402.14160",
    ),
    Row(
        family="tree",
        name="top_plus_one",
        home="outrider.trees.top_plus_one:TopPlusOneTree",
        summary="the likeliest n-1 tokens and one drawn from the rest",
        source="Hu et al. 2025, https://arxiv.org/abs/2502.18779",
    ),
    Row(
        family="tree",
        name="dynamic",
        home="outrider.trees.dynamic:DynamicTree",
        summary="expand the likeliest nodes, keep the likeliest of all",
        source="Li et al. 2024, EAGLE-2, https://arxiv.org/abs/2406.16858",
    ),
    Row(
        family="tree",
        name="lattice",
        home="outrider.trees.lattice:LatticeTree",
        summary="the best prefixes of per-position rows under a budget",
        source="Ringel and Romano 2026, DDTree, https://arxiv.org/abs/2604.12989",
    ),
    Row(
        family="tree",
        name="fixed",
        home="outrider.trees.fixed:FixedTree",
        summary="a given topology, children drawn without replacement or chosen",
        source="Chen et al. 2024, Sequoia, https://arxiv.org/abs/2402.12374",
    ),
    Row(
        family="tree",
        name="opt",
        home="outrider.trees.opt:OptTree",
        summary="the tree with the largest expected acceptance; as deep as that pays",
        source="Wang et al. 2024, OPT-Tree, https://arxiv.org/abs/2406.17276",
    ),
    Row(
        family="verifier",
        name="token",
        home="outrider.verifiers.token:TokenVerifier",
        summary="accept token by token with probability min(1, p/q)",
        source=LEVIATHAN,
    ),
    Row(
        family="verifier",
        name="block",
        home="outrider.verifiers.block:BlockVerifier",
        summary="accept the block jointly; never fewer tokens than token in expectation",
        source="Sun et al. 2024, https://arxiv.org/abs/2403.10444",
    ),
    Row(
        family="verifier",
        name="match",
        home="outrider.verifiers.match:MatchVerifier",
        summary="draw from the target and follow the draft while it agrees",
        source="Li et al. 2024, EAGLE, https://arxiv.org/abs/2401.15077",
    ),
    Row(
        family="verifier",
        name="coupled",
        home="outrider.verifiers.coupled:CoupledVerifier",
        summary="match, with the noise of the position for draft and target: the text depends on seed and target alone",
        source="Daliri et al. 2024, https://arxiv.org/abs/2408.07978",
    ),
    Row(
        family="verifier",
        name="recursive",
        home="outrider.verifiers.recursive:RecursiveVerifier",
        summary="try children in turn, each against the residual that the earlier ones left",
        source="Yang et al. 2024, MCSD, https://arxiv.org/abs/2401.06706",
    ),
    Row(
        family="verifier",
        name="kseq",
        home="outrider.verifiers.kseq:KseqVerifier",
        summary="judge all independent draws of a node by one discounted ratio",
        source="Sun et al. 2023, SpecTr, https://arxiv.org/abs/2310.15141",
    ),
    Row(
        family="verifier",
        name="top_plus_one",
        home="outrider.verifiers.top_plus_one:TopPlusOneVerifier",
        summary="the optimal rule for top n-1 and one draw",
        source="Hu et al. 2025, https://arxiv.org/abs/2502.18779",
    ),
    Row(
        family="verifier",
        name="traversal",
        home="outrider.verifiers.traversal:TraversalVerifier",
        summary="judge a tree from its leaves upwards; block verification for trees",
        source="Weng et al. 2025, https://arxiv.org/abs/2505.12398",
    ),
    Row(
        family="verifier",
        name="multipath",
        home="outrider.verifiers.multipath:MultipathVerifier",
        summary="block verification of the highest-ranking of independent paths",
        source="GBV 2026, https://arxiv.org/abs/2602.16961",
    ),
    Row(
        family="verifier",
        name="greedy_block",
        home="outrider.verifiers.greedy_block:GreedyBlockVerifier",
        summary="accept the most that one block can, then less in the next; an experiment",
        source="Sun et al. 2024, appendix, https://arxiv.org/abs/2403.10444",
    ),
    Row(
        family="verifier",
        name="lenient",
        home="outrider.verifiers.lenient:LenientVerifier",
        summary="accept more than the law allows, by a stated factor",
        source="Zhou et al. 2023, DistillSpec, https://arxiv.org/abs/2310.08461",
    ),
    Row(
        family="verifier",
        name="typical",
        home="outrider.verifiers.typical:TypicalVerifier",
        summary="accept what the target finds likely enough, given how sure it is",
        source="Cai et al. 2024, Medusa, https://arxiv.org/abs/2401.10774",
    ),
    Row(
        family="length",
        name="fixed",
        home="outrider.lengths.fixed:FixedLength",
        summary="the same length at every step",
        source=LEVIATHAN,
    ),
    Row(
        family="length",
        name="heuristic",
        home="outrider.lengths.heuristic:HeuristicLength",
        summary="longer after full acceptance, shorter after a rejection",
        source="Gante 2023, https://huggingface.co/blog/assisted-generation",
    ),
    Row(
        family="length",
        name="adaedl",
        home="outrider.lengths.adaedl:AdaedlLength",
        summary="stop where the entropy says that acceptance is unlikely; adapts",
        source="Agrawal et al. 2024, https://arxiv.org/abs/2410.18351",
    ),
    Row(
        family="length",
        name="svip",
        home="outrider.lengths.svip:SvipLength",
        summary="stop after a token that was drawn from an uncertain row",
        source="Zhang et al. 2024, https://arxiv.org/abs/2411.18462",
    ),
    Row(
        family="length",
        name="confident",
        home="outrider.lengths.confident:ConfidentLength",
        summary="stop where the drafter itself finds acceptance unlikely",
        source="DeepSeek 2026, DSpark, https://arxiv.org/abs/2607.05147",
    ),
    Row(
        family="length",
        name="planned",
        home="outrider.lengths.planned:PlannedLength",
        summary="the length with the most tokens per second, by costs and past acceptance",
        source="Yan et al. 2024, https://arxiv.org/abs/2402.01528",
    ),
    Row(
        family="length",
        name="tetris",
        home="outrider.lengths.tetris:TetrisLength",
        summary="draft longer, verify the most promising tokens of the batch",
        source="Wu et al. 2025, https://arxiv.org/abs/2502.15197",
    ),
    Row(
        family="length",
        name="goodput",
        home="outrider.lengths.goodput:GoodputLength",
        summary="the lengths with the most tokens per second, by measured costs; none where drafts lose time",
        source="Liu et al. 2024, SmartSpec, https://arxiv.org/abs/2406.14066",
    ),
    Row(
        family="decoding",
        name="step",
        home="outrider.decoding.step:StepDecoding",
        summary="draft, then verify the draft",
        source=LEVIATHAN,
    ),
    Row(
        family="decoding",
        name="pearl",
        home="outrider.decoding.pearl:PearlDecoding",
        summary="draft the next tokens while the target verifies the last ones",
        source="Liu et al. 2024, PEARL, https://arxiv.org/abs/2408.11850",
    ),
)


def rows(family: Family) -> dict[str, Row]:
    """The methods of one family by name."""
    return {row.name: row for row in ROWS if row.family == family}


def row_of(component: object) -> Row | None:
    """The catalog row of an object; None if its class is not in the catalog."""
    spec = getattr(component, "spec", None)
    if spec is not None:
        return next((row for row in ROWS if row.name == spec.name and row.kind is spec), None)
    home = f"{type(component).__module__}:{type(component).__qualname__}"
    return next((row for row in ROWS if home in (row.home, *row.bound)), None)


def name_of(component: object) -> str:
    """The catalog name of an object, or the name of its class if it is not in the catalog."""
    row = row_of(component)
    return type(component).__name__ if row is None else row.name


def make(family: Family, text: str | Mapping[str, Any]) -> object:
    """The object of `name:key=value,key=value`. A first value without a key sets the first field.

    A drafter may also be named by the directory, the GGUF file or the hub id of its checkpoint, which says what it is.
    One that holds others is written `name:other,other`, as `components` says, or as a mapping from its name to a list.

    Raises:
        InputError: Unknown name, unknown field or a value that is not of the field's type; lists the real ones.

    Example:
        >>> make("length", "fixed:num_speculative_tokens=3"), make("length", "fixed:3").num_speculative_tokens
        (FixedLength(num_speculative_tokens=3), 3)
    """
    known = rows(family)
    if isinstance(text, Mapping):
        return _holding(family, text)
    name, _, rest = text.partition(":")
    if name not in known:
        if family == "drafter" and is_place(text):
            from outrider.heads.recognition import drafter_at

            kind = drafter_at(text, {name: row.kind for name, row in known.items()})
            return known[kind].build(path=text)
        raise unknown(family, name, known)
    if hasattr(known[name].kind, "holding"):
        return _holding(family, {name: components(family, rest)})
    configured: Any = known[name].make
    values = field_values(f"{family} {name!r}", configured, rest, first=True)
    missing = [
        field.name
        for field in dataclasses.fields(configured)
        if field.name not in (*values, "spec")
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise InputError(f"{family} {name!r} needs {', '.join(missing)}, as in {name}:{missing[0]}=...")
    return known[name].build(**values)


def components(family: Family, text: str) -> list[str]:
    """The components in a text. A comma begins one if a name of the family or a place stands behind it, alone or before
    a colon. All other commas belong to the component before, as do all behind a component that holds others.

    Example:
        >>> components("drafter", "suffix:min_match=3,model:path=drafts/small,dtype=float32")
        ['suffix:min_match=3', 'model:path=drafts/small,dtype=float32']
    """
    known, parts, holds = rows(family), list[str](), False
    for item in filter(None, text.split(",")):
        name, colon, _ = item.partition(":")
        # Of a wrong name before a colon the message is better if it counts as one.
        begins = not holds and "=" not in name and (colon or name in known or is_place(item))
        holds = holds or (begins and name in known and hasattr(known[name].kind, "holding"))
        parts = [*parts, item] if begins or not parts else [*parts[:-1], f"{parts[-1]},{item}"]
    return parts


def _holding(family: Family, named: Mapping[str, Any]) -> object:
    """The object of one name and its components, which are texts or objects."""
    known = rows(family)
    name, held = next(iter(named.items()), ("", None))
    if name not in known:
        raise unknown(family, name, known)
    if len(named) > 1 or not isinstance(held, list | tuple) or not hasattr(known[name].kind, "holding"):
        holders = [each for each, row in known.items() if hasattr(row.kind, "holding")]
        able = f"one of {', '.join(holders)} and a list" if holders else "a text"
        raise InputError(f"a {family} is a text, or {able}, got {named!r}")
    return known[name].kind.holding([make(family, each) if isinstance(each, str | Mapping) else each for each in held])


def is_place(text: str) -> bool:
    """Whether a text is a directory or a GGUF file, or looks like a directory or like a hub id.

    Example:
        >>> is_place("ngram"), is_place("org/name"), is_place("suffix:corpus=texts/all")
        (False, True, False)
    """
    return os.path.isdir(text) or text.endswith(GGUF) or "/" in text.partition(":")[0]
