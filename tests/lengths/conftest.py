"""What several tests of lengths draft with."""

import pytest

from tests.world.models import llama


@pytest.fixture(scope="session")
def draft_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A drafter by name: a draft model of one layer in a folder."""
    place = tmp_path_factory.mktemp("draft")
    llama(num_layers=1).save_pretrained(place)
    return f"model:path={place}"
