"""Where a checkpoint is: a directory, or an id on the hub. A name that is neither is told at once."""

import os
from functools import lru_cache

from outrider.core.inputs import InputError, shown

LONGEST_ID = 256
"""Longer than any hub id."""
PATIENCE = 10.0
"""Seconds to wait for the hub's first answer."""


def check_place(path: str, what: str = "model", revision: str | None = None) -> None:
    """Raise InputError where a name can be neither a directory nor a hub id that can be reached.

    Without this, libraries ask an unreachable hub for half a minute, file by file.

    Args:
        what: What the place holds, for the message.
        revision: Branch, tag or commit of a hub id.
    """
    if os.path.isdir(os.path.expanduser(path)):
        return
    absent = f"there is no directory {path if 0 < len(path) <= LONGEST_ID else shown(path)}"
    if looks_local(path):
        raise InputError(f"{absent}; give a {what}'s directory or a hub id such as org/name")
    if (reason := _unreachable(path, revision or "main")) is not None:
        raise InputError(f"{absent}, and the hub cannot be reached to look for a {what} of that name: {reason}")


def looks_local(path: str) -> bool:
    """Whether a name can be no hub id: it begins or ends as a path, has several slashes, or is too long.

    Example:
        >>> [looks_local(name) for name in ("org/name", "gpt2", "./name", "a/b/c", "runs/")]
        [False, False, True, True, True]
    """
    begins = path.startswith((".", "/", "~")) or os.path.isabs(path)
    return not path or begins or path.endswith("/") or path.count("/") > 1 or len(path) > LONGEST_ID


@lru_cache(maxsize=64)
def _unreachable(path: str, revision: str) -> str | None:
    """Why the hub gives no answer about an id that is not in its cache, tried once; None where it answers."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        if constants.HF_HUB_OFFLINE or isinstance(try_to_load_from_cache(path, "config.json", revision=revision), str):
            return None
        get_hf_file_metadata(hf_hub_url(path, "config.json", revision=revision), timeout=PATIENCE)
    except (HfHubHTTPError, HFValidationError):
        # The hub has answered, or will not be asked; whoever loads the files says what is wrong.
        return None
    except Exception as error:
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    return None
