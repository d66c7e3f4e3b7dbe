"""The recipe on other engines measures by `outrider bench`, once for each temperature."""

from pathlib import Path

import pytest

from outrider import InputError
from outrider.bench.side_by_side.session import BenchPlan
from recipes import peers


def test_each_temperature_is_a_measurement_in_a_folder_of_its_own():
    setup = peers.setup_of("embedded", "float32", Path("none"), 1)
    cold, warm = peers.at_temperatures(BenchPlan(setup=setup, out=Path("out")), (0.0, 1.0))
    assert [plan.generation.sampling.temperature for plan in (cold, warm)] == [0, 1]
    assert [plan.out for plan in (cold, warm)] == [Path("out/temperature-0"), Path("out/temperature-1")]
    assert cold.setup == warm.setup


def test_what_is_not_known_is_refused(tmp_path):
    for given, name in (({"peers": "tensorflow"}, "peer"), ({"model": "small"}, "model"), ({"dtype": "int8"}, "dtype")):
        with pytest.raises(InputError, match=f"unknown {name} "):
            peers.main(environments=tmp_path, **given)
