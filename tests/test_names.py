"""A reader who sees the name of a class knows which class it is."""

import ast
from collections import defaultdict
from pathlib import Path

import outrider


def test_no_public_class_name_is_defined_twice():
    package = Path(outrider.__file__).parent
    defined: dict[str, list[str]] = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                defined[node.name].append(str(path.relative_to(package)))
    assert {name: places for name, places in defined.items() if len(places) > 1} == {}
