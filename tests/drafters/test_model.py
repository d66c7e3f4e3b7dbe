"""A draft model whose tokenizer is the target's."""

import shutil

import pytest

import outrider
from outrider.drafters.model import ModelPath
from outrider.embedded import EMBEDDED_DRAFT


@pytest.fixture
def reads(monkeypatch):
    """The directories whose tokenizers were read for a draft model."""
    seen, read = [], ModelPath.read_tokenizer
    monkeypatch.setattr(ModelPath, "read_tokenizer", lambda self: seen.append(self.path) or read(self))
    return seen


def test_the_very_files_of_the_targets_tokenizer_are_not_read_again(reads):
    drafter = outrider.load(drafter=f"model:path={EMBEDDED_DRAFT}", max_slots=1).parts.drafter
    assert reads == []
    assert drafter.short_list is None


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "added_tokens.json"])
def test_another_file_is_read(name, reads, tmp_path):
    shutil.copytree(EMBEDDED_DRAFT, tmp_path, dirs_exist_ok=True)
    file = tmp_path / name
    file.write_text((file.read_text() if file.exists() else "{}") + "\n")
    outrider.load(drafter=f"model:path={tmp_path}", max_slots=1)
    assert reads == [str(tmp_path)]
