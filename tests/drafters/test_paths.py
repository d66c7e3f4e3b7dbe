"""Every drafter that is loaded from a path refuses a context without tokens."""

from dataclasses import fields

import pytest

from outrider import catalog
from outrider.core.types import InputError
from tests.world.heads import HEADS

WITH_CONTEXT = [
    name for name, row in catalog.rows("drafter").items() if "max_context" in {field.name for field in fields(row.make)}
]


def test_every_head_has_a_longest_context():
    assert {"model", *HEADS} <= {*WITH_CONTEXT}


@pytest.mark.parametrize("name", WITH_CONTEXT)
@pytest.mark.parametrize("length", [0, -3])
def test_a_context_without_tokens_is_refused(name, length):
    with pytest.raises(InputError, match=f"max_context must be >= 1, got {length}"):
        catalog.make("drafter", f"{name}:path=nowhere,max_context={length}")
