"""Commands that talk to a server instead of loading a target: which one, and with which key."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.cli.serve import API_KEY
from outrider.core.inputs import InputError, unknown

if TYPE_CHECKING:
    from outrider.serve.client.remote import Remote
else:
    Remote = object


@dataclass(frozen=True, kw_only=True)
class RemoteOptions:
    """A server to talk to.

    Attributes:
        url: Talk to the server at this URL, such as http://127.0.0.1:8000, instead of loading a target.
        api_key: The key that the server asks for; it may also be in OUTRIDER_API_KEY.
        model: The name of the server's model; by default its first one.
    """

    url: str | None = None
    api_key: str | None = None
    model: str | None = None

    def __post_init__(self) -> None:
        for name in ("api_key", "model"):
            if getattr(self, name) is not None and self.url is None:
                raise InputError(f"--{name.replace('_', '-')} is about a server; give --url too")

    def remote(self) -> "Remote":
        """The server."""
        from outrider.serve.client.remote import Remote

        return Remote(url=self.url or "", key=self.api_key or os.environ.get(API_KEY))

    def card(self, remote: "Remote") -> dict[str, Any]:
        """The card of the model, as `/v1/models` has it."""
        cards = remote.models()
        if self.model is None:
            return cards[0]
        for card in cards:
            if card["id"] == self.model:
                return card
        raise unknown("model", self.model, [str(card["id"]) for card in cards])
