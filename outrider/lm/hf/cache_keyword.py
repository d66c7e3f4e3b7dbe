"""The keyword by which a module of transformers takes its cache.

Relied on in transformers (read in 5.17 - 5.24, run in 5.17, 5.23 and 5.24): it is `cache` from 5.24 on. Before, it is
`past_key_values`, and `cache_params` of models whose layers are all recurrent. Code that comes with a checkpoint may
keep an older name.
"""

import inspect

from torch import nn

from outrider.core.types import InputError

CACHE_KEYWORDS = ("cache", "past_key_values", "cache_params")
"""The names that the keyword has or had, the newest first."""


def cache_keyword(kind: type[nn.Module]) -> str:
    """The keyword by which the forward of a kind of module takes its cache.

    Raises:
        InputError: It takes none.

    Example:
        >>> from transformers import LlamaForCausalLM
        >>> cache_keyword(LlamaForCausalLM) in CACHE_KEYWORDS
        True
    """
    if (keyword := find_cache_keyword(kind)) is None:
        raise InputError(f"{kind.__name__}.forward takes no cache (none of {', '.join(CACHE_KEYWORDS)})")
    return keyword


def find_cache_keyword(kind: type[nn.Module]) -> str | None:
    """The same, or None where the forward takes no cache. XLM's own `cache` is a dict of tensors, and is none."""
    known = inspect.signature(kind.forward).parameters
    taken = [name for name in CACHE_KEYWORDS if name in known and "dict" not in str(known[name].annotation)]
    return next(iter(taken), None)
