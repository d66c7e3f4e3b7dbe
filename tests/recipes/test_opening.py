from pathlib import Path

from recipes.opening import BARE, READING, warmed


def test_before_the_first_round_transformers_opens_folders_and_files_only_if_nobody_else_does():
    folder, file = Path("model"), Path("model.gguf")
    assert warmed([BARE, READING, "default"], [folder]) == [BARE, READING, "default"]
    assert warmed([BARE, "default"], [file, file]) == ["default"]
    assert warmed([BARE, "default"], [file, folder]) == [BARE, "default"]
    assert warmed([BARE], [file]) == [BARE]
