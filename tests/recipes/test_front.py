"""The picture of the front page says what the run's summary says."""

import json

import pytest

from outrider.core.types import InputError
from recipes.front import main, picture

WAYS = [
    ("plain (no drafting)", 61.94),
    ("default", 90.0),
    ("llama.cpp, plain", 51.1),
    ("llama.cpp, ngram-simple", 52.1),
]
SUMMARY = {"verdict": "faster", "ways": [{"way": way, "output_throughput": speed} for way, speed in WAYS]}


def test_the_picture_names_each_way_with_its_speed_the_fastest_first():
    drawn = picture(SUMMARY, "a model")
    names = ["Outrider: 90", "Outrider, plain: 61.9", "llama.cpp, ngram-simple: 52.1", "llama.cpp, plain: 51.1"]
    places = [drawn.index(f">{name}<") for name in names]
    assert places == sorted(places)
    assert ">a model<" in drawn


def test_without_figures_there_is_no_picture(tmp_path):
    with pytest.raises(InputError, match="nothing was measured: stopped"):
        picture({"verdict": "stopped", "ways": []}, "a model")
    with pytest.raises(InputError, match="not the folder of a run"):
        main(out=tmp_path, as_is=True)
    with pytest.raises(InputError, match="give the folder with --out"):
        main(as_is=True)


def test_a_picture_is_drawn_of_a_folder_that_is_there(tmp_path):
    circumstances = {"cpu": "Some CPU", "threads": 2}
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    (tmp_path / "circumstances.json").write_text(json.dumps({"circumstances": circumstances}))
    main(out=tmp_path, target="models/some.gguf", as_is=True)
    assert ">some.gguf, Some CPU, 2 threads, one prompt at a time<" in (tmp_path / "front.svg").read_text()
