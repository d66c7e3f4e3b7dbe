"""A name of a checkpoint that is neither here nor at a hub that answers is told at once."""

import socket

import pytest
from huggingface_hub import constants

import outrider
from outrider.core.inputs import InputError


@pytest.fixture
def hub_away(monkeypatch) -> None:
    """The hub is a port at which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", address)


@pytest.mark.usefixtures("hub_away")
@pytest.mark.parametrize(
    "options",
    [
        {"target": "models/tagret"},
        {"tokenizer": "models/tokeniser"},
        {"drafter": "models/darft"},
        {"drafter": "eagle:path=models/haed"},
        {"drafter": "model:path=models/darft2"},
    ],
    ids=str,
)
def test_a_mistyped_folder_is_told_and_the_hub_asked_once(options, caplog):
    with pytest.raises(InputError, match=r"there is no directory models/\w+, and the hub cannot be reached"):
        outrider.load(**options)
    assert "Retrying" not in caplog.text


@pytest.mark.parametrize("target", ["./nosuch", "~/no/such", "a/b/c", "runs/", "/nosuch"])
def test_a_path_is_never_looked_for_at_the_hub(target):
    with pytest.raises(InputError, match=r"there is no directory .*; give a model's directory or a hub id such as"):
        outrider.load(target)
