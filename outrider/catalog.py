"""Every method by name: its class, its paper, its guarantee. The one place where a string becomes an object."""

import dataclasses

from outrider.core.inputs import InputError, field_values, unknown
from outrider.core.row import LEVIATHAN, Family, Row
from outrider.decoding.pearl import PearlDecoding
from outrider.decoding.step import StepDecoding
from outrider.drafters.recognition import drafter_at, is_place
from outrider.drafters.rows import DRAFTERS
from outrider.lengths.adaedl import AdaedlLength
from outrider.lengths.confident import ConfidentLength
from outrider.lengths.fixed import FixedLength
from outrider.lengths.goodput import GoodputLength
from outrider.lengths.heuristic import HeuristicLength
from outrider.lengths.planned import PlannedLength
from outrider.lengths.svip import SvipLength
from outrider.lengths.tetris import TetrisLength
from outrider.trees.beam import BeamTree
from outrider.trees.chain import ChainTree
from outrider.trees.dynamic import DynamicTree
from outrider.trees.fixed import FixedTree
from outrider.trees.gumbel import GumbelTree
from outrider.trees.iid import IidTree
from outrider.trees.lattice import LatticeTree
from outrider.trees.opt import OptTree
from outrider.trees.top_plus_one import TopPlusOneTree
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.greedy_block import GreedyBlockVerifier
from outrider.verifiers.kseq import KseqVerifier
from outrider.verifiers.lenient import LenientVerifier
from outrider.verifiers.match import MatchVerifier
from outrider.verifiers.multipath import MultipathVerifier
from outrider.verifiers.recursive import RecursiveVerifier
from outrider.verifiers.token import TokenVerifier
from outrider.verifiers.top_plus_one import TopPlusOneVerifier
from outrider.verifiers.traversal import TraversalVerifier
from outrider.verifiers.typical import TypicalVerifier

ROWS = (
    *DRAFTERS,
    Row(family="tree", name="chain", home=ChainTree, summary="one child per node", source=LEVIATHAN),
    Row(
        family="tree",
        name="iid",
        home=IidTree,
        summary="independent paths, repeated draws kept or, with dedup, dropped",
        source="Miao et al. 2023, SpecInfer, https://arxiv.org/abs/2305.09781",
    ),
    Row(
        family="tree",
        name="gumbel",
        home=GumbelTree,
        summary="children drawn without replacement, a fixed number per depth",
        source="Jeon et al. 2024, RSD-C, https://arxiv.org/abs/2402.14160",
    ),
    Row(
        family="tree",
        name="beam",
        home=BeamTree,
        summary="stochastic beam: sequences drawn without replacement, a fixed number per level",
        source="Jeon et al. 2024, RSD-S, https://arxiv.org/abs/2402.14160",
    ),
    Row(
        family="tree",
        name="top_plus_one",
        home=TopPlusOneTree,
        summary="the likeliest n-1 tokens and one drawn from the rest",
        source="Hu et al. 2025, https://arxiv.org/abs/2502.18779",
    ),
    Row(
        family="tree",
        name="dynamic",
        home=DynamicTree,
        summary="expand the likeliest nodes, keep the likeliest of all",
        source="Li et al. 2024, EAGLE-2, https://arxiv.org/abs/2406.16858",
    ),
    Row(
        family="tree",
        name="lattice",
        home=LatticeTree,
        summary="the best prefixes of per-position rows under a budget",
        source="Ringel and Romano 2026, DDTree, https://arxiv.org/abs/2604.12989",
    ),
    Row(
        family="tree",
        name="fixed",
        home=FixedTree,
        summary="a given topology, children drawn without replacement or chosen",
        source="Chen et al. 2024, Sequoia, https://arxiv.org/abs/2402.12374",
    ),
    Row(
        family="tree",
        name="opt",
        home=OptTree,
        summary="the tree with the largest expected acceptance; as deep as that pays",
        source="Wang et al. 2024, OPT-Tree, https://arxiv.org/abs/2406.17276",
    ),
    Row(
        family="verifier",
        name="token",
        home=TokenVerifier,
        summary="accept token by token with probability min(1, p/q)",
        source=LEVIATHAN,
    ),
    Row(
        family="verifier",
        name="block",
        home=BlockVerifier,
        summary="accept the block jointly; never fewer tokens than token in expectation",
        source="Sun et al. 2024, https://arxiv.org/abs/2403.10444",
    ),
    Row(
        family="verifier",
        name="match",
        home=MatchVerifier,
        summary="draw from the target and follow the draft while it agrees",
        source="Li et al. 2024, EAGLE, https://arxiv.org/abs/2401.15077",
    ),
    Row(
        family="verifier",
        name="recursive",
        home=RecursiveVerifier,
        summary="try children in turn, each against the residual that the earlier ones left",
        source="Yang et al. 2024, MCSD, https://arxiv.org/abs/2401.06706",
    ),
    Row(
        family="verifier",
        name="kseq",
        home=KseqVerifier,
        summary="judge all independent draws of a node by one discounted ratio",
        source="Sun et al. 2023, SpecTr, https://arxiv.org/abs/2310.15141",
    ),
    Row(
        family="verifier",
        name="top_plus_one",
        home=TopPlusOneVerifier,
        summary="the optimal rule for top n-1 and one draw",
        source="Hu et al. 2025, https://arxiv.org/abs/2502.18779",
    ),
    Row(
        family="verifier",
        name="traversal",
        home=TraversalVerifier,
        summary="judge a tree from its leaves upwards; block verification for trees",
        source="Weng et al. 2025, https://arxiv.org/abs/2505.12398",
    ),
    Row(
        family="verifier",
        name="multipath",
        home=MultipathVerifier,
        summary="block verification of the highest-ranking of independent paths",
        source="GBV 2026, https://arxiv.org/abs/2602.16961",
    ),
    Row(
        family="verifier",
        name="greedy_block",
        home=GreedyBlockVerifier,
        summary="accept the most that one block can, then less in the next; an experiment",
        source="Sun et al. 2024, appendix, https://arxiv.org/abs/2403.10444",
    ),
    Row(
        family="verifier",
        name="lenient",
        home=LenientVerifier,
        summary="accept more than the law allows, by a stated factor",
        source="Zhou et al. 2023, DistillSpec, https://arxiv.org/abs/2310.08461",
    ),
    Row(
        family="verifier",
        name="typical",
        home=TypicalVerifier,
        summary="accept what the target finds likely enough, given how sure it is",
        source="Cai et al. 2024, Medusa, https://arxiv.org/abs/2401.10774",
    ),
    Row(family="length", name="fixed", home=FixedLength, summary="the same length at every step", source=LEVIATHAN),
    Row(
        family="length",
        name="heuristic",
        home=HeuristicLength,
        summary="longer after full acceptance, shorter after a rejection",
        source="Gante 2023, https://huggingface.co/blog/assisted-generation",
    ),
    Row(
        family="length",
        name="adaedl",
        home=AdaedlLength,
        summary="stop where the entropy says that acceptance is unlikely; adapts",
        source="Agrawal et al. 2024, https://arxiv.org/abs/2410.18351",
    ),
    Row(
        family="length",
        name="svip",
        home=SvipLength,
        summary="stop after a token that was drawn from an uncertain row",
        source="Zhang et al. 2024, https://arxiv.org/abs/2411.18462",
    ),
    Row(
        family="length",
        name="confident",
        home=ConfidentLength,
        summary="stop where the drafter itself finds acceptance unlikely",
        source="DeepSeek 2026, DSpark, https://arxiv.org/abs/2607.05147",
    ),
    Row(
        family="length",
        name="planned",
        home=PlannedLength,
        summary="the length with the most tokens per second, by costs and past acceptance",
        source="Yan et al. 2024, https://arxiv.org/abs/2402.01528",
    ),
    Row(
        family="length",
        name="tetris",
        home=TetrisLength,
        summary="draft longer, verify the most promising tokens of the batch",
        source="Wu et al. 2025, https://arxiv.org/abs/2502.15197",
    ),
    Row(
        family="length",
        name="goodput",
        home=GoodputLength,
        summary="one length for the batch, by what steps are seen to cost; none where no draft pays",
        source="Liu et al. 2024, SmartSpec, https://arxiv.org/abs/2406.14066",
    ),
    Row(family="decoding", name="step", home=StepDecoding, summary="draft, then verify the draft", source=LEVIATHAN),
    Row(
        family="decoding",
        name="pearl",
        home=PearlDecoding,
        summary="draft the next tokens while the target verifies the last ones",
        source="Liu et al. 2024, PEARL, https://arxiv.org/abs/2408.11850",
    ),
)


def rows(family: Family) -> dict[str, Row]:
    """The methods of one family by name."""
    return {row.name: row for row in ROWS if row.family == family}


def row_of(component: object) -> Row | None:
    """The catalog row of an object; None if its class is not in the catalog."""
    kind = getattr(component, "spec", type(component))
    return next((row for row in ROWS if row.kind is kind), None)


def name_of(component: object) -> str:
    """The catalog name of an object, or the name of its class if it is not in the catalog."""
    row = row_of(component)
    return type(component).__name__ if row is None else row.name


def make(family: Family, text: str) -> object:
    """The object of `name:key=value,key=value`. A first value without a key sets the first field.

    A drafter may also be named by the directory or the hub id of its checkpoint, which says what it is.

    Raises:
        InputError: Unknown name, unknown field or a value that is not of the field's type; lists the real ones.

    Example:
        >>> make("length", "fixed:num_speculative_tokens=3"), make("length", "fixed:3").num_speculative_tokens
        (FixedLength(num_speculative_tokens=3), 3)
    """
    name, _, rest = text.partition(":")
    known = rows(family)
    if name not in known:
        if family == "drafter" and is_place(text):
            kind = drafter_at(text, {name: row.kind for name, row in known.items()})
            return known[kind].made(path=text)
        raise unknown(family, name, known)
    kind = known[name].make
    values = field_values(f"{family} {name!r}", kind, rest, first=True)
    missing = [
        field.name
        for field in dataclasses.fields(kind)
        if field.name not in (*values, "spec")
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise InputError(f"{family} {name!r} needs {', '.join(missing)}, as in {name}:{missing[0]}=...")
    return known[name].made(**values)
