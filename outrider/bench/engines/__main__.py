"""`python -m outrider.bench.engines vllm --environments DIR` makes environments of other engines that are missing."""

from pathlib import Path
from typing import Annotated

import typer

from outrider.bench.engines.environments import CannotMake
from outrider.bench.side_by_side.peers import OUTSIDE, usual_folder


def main(
    engines: Annotated[list[str], typer.Argument(help=f"Of {', '.join(OUTSIDE)}.")],
    environments: Annotated[Path | None, typer.Option(help="Folder of the environments, several GB.")] = None,
) -> None:
    """Make environments of engines, each with pinned versions; print the Python of each."""
    folder, failed = environments or usual_folder(), False
    for name in engines:
        if name not in OUTSIDE:
            raise typer.BadParameter(f"unknown engine {name!r}; available: {', '.join(OUTSIDE)}")
        environment = OUTSIDE[name].environment
        try:
            print(f"{name}: {environment.ready(folder).python if environment else 'this one'}", flush=True)
        except CannotMake as error:
            failed = True
            print(f"{name} cannot be made: {error}", flush=True)
    raise typer.Exit(int(failed))


if __name__ == "__main__":
    typer.run(main)
