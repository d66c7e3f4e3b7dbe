"""Memory and energy are read where the machine tells them, and left out where it does not."""

import torch

from outrider.bench.side_by_side.meters import counters, measured, peak_resident, spent

CPU = torch.device("cpu")


def package(powercap, name: str, microjoules: int, largest: int = 1000) -> None:
    folder = powercap / name
    folder.mkdir(exist_ok=True)
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    (folder / "max_energy_range_uj").write_text(f"{largest}\n")


def test_energy_is_the_sum_over_packages_without_their_parts(tmp_path):
    for name in ("intel-rapl:0", "intel-rapl:1", "intel-rapl:0:0"):
        package(tmp_path, name, 100)
    before = counters(tmp_path)
    package(tmp_path, "intel-rapl:0", 400)
    # The other counter was at its end, and began again.
    package(tmp_path, "intel-rapl:1", 50)
    assert before == {"intel-rapl:0": 100, "intel-rapl:1": 100}
    assert spent(before, counters(tmp_path), tmp_path) == (300 + 950) / 1e6


def test_what_the_machine_does_not_tell_is_left_out(tmp_path):
    with measured(CPU, process=tmp_path, powercap=tmp_path) as reading:
        pass
    assert (reading.peak_memory, reading.joules) == (None, None)


def test_peak_memory_is_what_the_process_held_at_most(tmp_path):
    (tmp_path / "status").write_text("Name:\tpython\nVmPeak:\t9 kB\nVmHWM:\t    12 kB\nVmRSS:\t 3 kB\n")
    assert peak_resident(tmp_path) == 12 * 1024
    with measured(CPU, process=tmp_path, powercap=tmp_path) as reading:
        assert (tmp_path / "clear_refs").read_text() == "5"
    assert reading.peak_memory == 12 * 1024
