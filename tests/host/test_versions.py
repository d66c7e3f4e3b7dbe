"""Libraries of versions that were never tested are told of, with the command that installs those that were."""

import ast
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import outrider
from outrider.host.versions import UntestedWarning, untested, warn_of_untested
from outrider.lm.open import as_lm
from tests.world.zoo import tiny

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REQUIREMENTS = list(chain(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()))


def test_libraries_beyond_their_bounds_are_named_in_one_sentence_with_the_command_that_installs_others() -> None:
    sentence = untested(["numpy>=1,<1.5", "hypothesis", "nowhere-to-be-found<2", 'pytest<2; extra == "dev"'])
    assert sentence is not None
    assert sentence.startswith("Outrider was not tested with numpy ")
    assert sentence.endswith('; `pip install "numpy<1.5,>=1" "pytest<2"` installs what was tested')


@pytest.mark.parametrize("bound", ["numpy", "numpy>=1", "numpy>=1,<1000"])
def test_libraries_within_their_bounds_are_not_told_of(bound: str) -> None:
    assert untested([bound]) is None


def test_whoever_opens_a_model_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = tmp_path / "outrider-0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: outrider\nVersion: 0\nRequires-Dist: numpy<1\n")
    monkeypatch.syspath_prepend(tmp_path)
    warn_of_untested.cache_clear()
    model = tiny("llama")
    with pytest.warns(UntestedWarning, match='pip install "numpy<1"') as told:
        as_lm(model, max_slots=1)
    as_lm(model, max_slots=1)
    assert len(told) == 1


def private_libraries() -> set[str]:
    """The libraries, other than Python's own, of which the package reads or imports a private name."""
    found = set()
    for file in Path(outrider.__file__).parent.rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        libraries = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
            if alias.asname is None
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                path = [*node.module.split("."), *(alias.name for alias in node.names)]
            elif isinstance(node, ast.Import):
                path = node.names[0].name.split(".")
            elif isinstance(node, ast.Attribute):
                path = ast.unparse(node).split(".")
                path = path if path[0] in libraries else [""]
            else:
                continue
            if any(name.startswith("_") and not name.endswith("__") for name in path[1:]):
                found.add(path[0])
    return found - {"outrider", *sys.stdlib_module_names}


def test_libraries_of_which_private_names_are_used_have_an_upper_bound() -> None:
    bounded = {
        requirement.name
        for requirement in map(Requirement, REQUIREMENTS)
        if any(bound.operator == "<" for bound in requirement.specifier)
    }
    # Models of transformers are objects, whose private attributes are not seen here.
    assert {*private_libraries(), "transformers"} <= bounded
