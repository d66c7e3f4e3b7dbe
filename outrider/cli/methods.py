"""outrider methods: what the catalog holds, and which combinations are lossless."""

import dataclasses
import json
from typing import get_args

from rich.console import Console
from rich.table import Table

from outrider import catalog
from outrider.catalog import Family
from outrider.cli.options import Json
from outrider.proof.matrix import LOSSLESS, Kind


def methods(as_json: Json = False) -> None:
    """List every drafter, tree, verifier and length policy, with its paper and its fields."""
    kinds = get_args(Kind)
    if as_json:
        rows = [
            {"family": r.family, "name": r.name, "summary": r.summary, "source": r.source, "guarantee": r.guarantee}
            | {"fields": _fields(r.make)}
            for r in catalog.ROWS
        ]
        matrix = {name: {kind: kind in lossless for kind in kinds} for name, lossless in LOSSLESS.items()}
        print(json.dumps({"methods": rows, "lossless": matrix}, indent=2))
        return
    console = Console()
    for family in get_args(Family):
        table = Table(title=f"{family}s" if family != "length" else "length policies", title_justify="left", box=None)
        for column in ("name", "what it does", "fields", "source"):
            table.add_column(column, overflow="fold")
        for row in catalog.rows(family).values():
            fields = ", ".join(f"{k}={v}" for k, v in _fields(row.make).items()) or "-"
            table.add_row(row.name, row.summary, fields, row.source)
        console.print(table)
        console.print()
    table = Table(title="lossless combinations (the others are refused)", title_justify="left", box=None)
    table.add_column("draft")
    for name in LOSSLESS:
        table.add_column(name)
    for kind in kinds:
        table.add_row(kind, *("exact law" if kind in LOSSLESS[name] else "refused" for name in LOSSLESS))
    console.print(table)


def _fields(make: type) -> dict[str, str]:
    shown = {}
    for field in dataclasses.fields(make):
        if not field.name.startswith("_"):
            shown[field.name] = "required" if field.default is dataclasses.MISSING else str(field.default)
    return shown
