"""What was found of a model when it was opened: kept between processes where its weights were read from files."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from outrider.host import remembered
from outrider.lm.fingerprint import read_from, shape_of, source

RECORD = "checks"
"""The kind of record that keeps findings between processes."""


class Checked:
    """Findings that follow from a model, its files, this machine and this source alone.

    Args:
        model: The model. Where its weights may have changed since they were read, everything is found anew.
        settings: What else the findings depend on, as values of JSON.
    """

    def __init__(self, model: PreTrainedModel, settings: Mapping[str, Any]) -> None:
        weights, self._key = read_from(model), dict[str, Any]()
        if weights is not None:
            source_digests = {name: digest.hex() for name, digest in source(Path(__file__).parent).items()}
            self._key = {
                "machine": remembered.machine(model.device),
                "source": source_digests,
                "weights": weights,
                "shape": shape_of(model),
                "attention": model.config._attn_implementation,
                "settings": dict(settings),
            }
        self._values = (remembered.read(RECORD, self._key) or {}) if self._key else {}

    def find(self, name: str, find: Callable[[], Any]) -> Any:
        """The finding of this name, a value of JSON; it is found now if it is not kept."""
        if name not in self._values:
            self._values[name] = find()
            if self._key:
                remembered.write(RECORD, self._key, self._values)
        return self._values[name]

    def flaw(self, name: str, find: Callable[[], str | None]) -> str | None:
        """What is wrong, if something is; only that nothing is wrong is kept."""
        if name in self._values:
            return None
        reason = find()
        return self.find(name, lambda: None) if reason is None else reason
