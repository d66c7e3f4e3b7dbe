"""Keys that let clients in."""

import hashlib
import secrets
from collections.abc import Sequence

from starlette.datastructures import Headers


class Keys:
    """The keys of a server, as digests.

    Example:
        >>> keys = Keys(["abc"])
        >>> keys.owner(Headers({"authorization": "Bearer abc"})), keys.owner(Headers({"x-api-key": "abd"}))
        ('0', None)
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def owner(self, headers: Headers) -> str | None:
        """The number of the key that a client sent; None if it sent none of them. Takes the same time for all keys."""
        scheme, _, credentials = headers.get("authorization", "").partition(" ")
        sent = credentials.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest, owner = _digest(sent), None
        for i, known in enumerate(self._digests):
            if secrets.compare_digest(known, digest):
                owner = str(i)
        return owner


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", errors="surrogateescape")).digest()
