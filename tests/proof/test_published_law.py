"""The law of whole runs with what is published beside a target: tables, and real models over two tokens."""

from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider import catalog
from outrider.drafters.protocol import Drafter
from outrider.engine.engine import Engine
from outrider.heads.assistant import AssistantDrafter, TabularAssistant
from outrider.heads.mtp import MtpPath
from outrider.lm.open import as_lm
from outrider.lm.target_info import TargetInfo
from outrider.proof.rule import law_error
from outrider.proof.runs import law_of_runs
from recipes.published_pairs import Size, gemma4, mtp_target
from tests.proof.test_head_law import CELLS, request, rows, small
from tests.proof.tiny_runs import BOUND, SLOTS, assert_lossless, engine, pair, walk
from tests.world.published import needs_mtp
from tests.world.tables import tables
from tests.world.verifiers import verifier

pytestmark = pytest.mark.usefixtures("float64_stays_float64")

TABLE = AssistantDrafter(head=TabularAssistant(2, seed=1), tap=0)
SIZE = Size(vocab=2, strength=1.0)
PUBLISHED = ("mtp", "mtp layers", "assistant")


@pytest.mark.parametrize(("tree", "rule"), CELLS)
def test_whole_runs_of_an_assistant_on_tables_keep_the_law(tree, rule):
    made = Engine(small(TABLE, tree, rule), max_slots=2, keep_warm=False)
    found = law_of_runs(made, [request(0, 1, 1)], rows([request(0, 1, 1)]))
    assert found.error < 1e-12
    assert found.accepted > 0


@pytest.mark.parametrize(("rule", "error"), [("block", 0.0), ("lenient", 1e-3)])
def test_the_gate_enumerates_an_assistant(rule, error):
    found = law_error(tables(2, verifier(rule), drafter=TABLE))
    assert found < 1e-12 if not error else found > error


@pytest.fixture(scope="module")
def over(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, str], Engine]:
    """Engines over tiny targets with two tokens."""
    made: dict[str, tuple[object, Callable[[TargetInfo], Drafter]]] = {}

    def place(kind: str) -> tuple[object, Callable[[TargetInfo], Drafter]]:
        folder = tmp_path_factory.mktemp("published")
        if kind.startswith("mtp"):
            needs_mtp()
            target = mtp_target("glm4_moe", SIZE, folder, num_mtp_layers=2 if "layers" in kind else 1)
            return target, MtpPath().bind
        target, own = gemma4(SIZE, folder)
        return target, catalog.make("drafter", str(own)).bind

    def build(kind: str, rule: str = "block", tree: str = "chain") -> Engine:
        if kind not in made:
            made[kind] = place(kind)
        target, bind = made[kind]
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64, experts_implementation="eager").eval()
        if kind == "assistant":
            # Flatter rows, so that no token is sure to come.
            model.model.norm.weight.data.mul_(0.3)
        lm = as_lm(model, max_slots=SLOTS, max_context=64)
        return engine(lm, bind(TargetInfo.of(lm, None)), rule, tree)

    return build


@pytest.mark.parametrize(("rule", "tree"), [("block", "chain"), ("recursive", "gumbel:branching=2x1")])
@pytest.mark.parametrize("kind", PUBLISHED)
def test_whole_runs_over_a_real_model_keep_the_law(over, kind, rule, tree):
    assert_lossless(walk(over(kind, rule, tree), most=4))


@pytest.mark.parametrize("kind", PUBLISHED)
def test_two_requests_of_a_batch_keep_the_law_together(over, kind):
    assert pair(over(kind), [(1, 0, 1, 1, 0), (0, 1)], most=3).error < BOUND
