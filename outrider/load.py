"""outrider.load: options become an engine. torch and transformers are imported when it is called."""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec

from outrider.setup import Setup

if TYPE_CHECKING:
    from outrider.engine.engine import Engine
else:
    Engine = object

Options = ParamSpec("Options")


def _taking(setup: Callable[Options, Setup]) -> Callable[[Callable[..., Engine]], Callable[Options, Engine]]:
    """Give a function the arguments of `Setup` by name, for type checkers, editors and `help`."""

    def typed(function: Callable[..., Engine]) -> Callable[Options, Engine]:
        signature = inspect.signature(setup).replace(return_annotation="outrider.Engine")
        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    return typed


@_taking(Setup)
def load(target: Any = None, **options: Any) -> Engine:
    """An engine for a target. Parts that would change the target's law are refused.

    Args:
        target: Directory, hub id or loaded model; None is the embedded pair.
        options: The other fields of `outrider.Setup`, which describes them all.

    Raises:
        InputError: An option, file or method does not exist, or the parts do not fit or are not lossless. The message
            says what works.

    Example:
        >>> load(verifier="blok")
        Traceback (most recent call last):
        ...
        outrider.core.inputs.InputError: unknown verifier 'blok'; did you mean 'block'? Available: token, block, match,
        coupled, recursive, kseq, top_plus_one, traversal, multipath, greedy_block, lenient, typical
    """
    from outrider.assembly import assemble

    return assemble(Setup.of({"target": target, **options}))
