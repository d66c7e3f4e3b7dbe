"""`python -m recipes` lists the recipes; `python -m recipes NAME --help` has the options of one."""

import ast
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.core import progress
from outrider.core.inputs import InputError

HERE = Path(__file__).parent
Quick = Annotated[
    bool, typer.Option("--quick", help="Small enough to end in about a minute: it shows that all parts work.")
]


def recipes() -> dict[str, str]:
    """Name and first line of every recipe: every module here that has a function `main`. Nothing is imported.

    Example:
        >>> recipes()["regression"]
        'Outputs of the engine in fixed configurations, to compare before and after a change that should alter nothing.'
    """
    found = {}
    for file in sorted(HERE.glob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        named = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if "main" in named and not file.name.startswith("_"):
            found[file.stem] = (ast.get_docstring(tree) or "").splitlines()[0]
    return found


def with_quick(main: Callable[..., object], quick: Mapping[str, object], wanted: bool) -> Callable[..., None]:
    """A recipe's function with the option `--quick`, and with the defaults of its quick form if that is wanted."""

    @functools.wraps(main)
    def run(quick: bool = False, **given: Any) -> None:
        main(**given)

    options = inspect.signature(main).parameters
    if unknown := set(quick) - set(options):
        raise TypeError(f"the quick form gives {', '.join(sorted(unknown))}, which are no options")
    chosen = [p.replace(default=quick.get(p.name, p.default)) if wanted else p for p in options.values()]
    flag = inspect.Parameter("quick", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Quick)
    keyed = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in chosen]
    run.__signature__ = inspect.Signature([*keyed, flag])  # type: ignore[attr-defined]
    run.__annotations__ = {**main.__annotations__, "quick": Quick}
    return run


def command(name: str, arguments: Sequence[str]) -> None:
    """Run one recipe with its options.

    Raises:
        InputError: There is no such recipe, or what was given is wrong.
    """
    known = recipes()
    if name not in known:
        raise InputError(f"unknown recipe {name!r}; available: {', '.join(known)}")
    try:
        with progress.importing():
            module = importlib.import_module(f"recipes.{name}")
            from transformers.utils import logging
    except ModuleNotFoundError as error:
        raise InputError(
            f"this recipe needs {error.name}; install the extras: pip install -e '.[bench,train]'"
        ) from error
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(help=module.__doc__)(with_quick(module.main, getattr(module, "QUICK", {}), "--quick" in arguments))
    app(list(arguments), prog_name=f"python -m recipes {name}")


def main(arguments: Sequence[str]) -> None:
    """List the recipes, or run one. What was typed wrong becomes one sentence and exit status 2."""
    if not arguments or arguments[0] in ("--help", "-h"):
        for name, line in recipes().items():
            print(f"{name:<18}{line}")
        return
    try:
        command(arguments[0], arguments[1:])
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
