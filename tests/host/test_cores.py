"""How many cores a process may use, and how many are free, from made-up files and made-up moments."""

import os
from math import inf

import pytest

from outrider.host.cores import CoreUsage, affinity, quota, shares, usable_cores

CORES = len(affinity())


def groups(root, table: str, **files: str) -> None:
    """Write a `/proc/self/cgroup` and files of control groups; `__` in a name stands for `/`."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(table)
    for name, text in files.items():
        place = root / "sys/fs/cgroup" / name.replace("__", "/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)


def test_a_system_without_control_groups_has_no_quota(tmp_path):
    assert quota(tmp_path) == inf
    assert usable_cores(tmp_path) == len(affinity())


@pytest.mark.parametrize(
    ("table", "files", "cores"),
    [
        ("0::/a/b\n", {"a__b__cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a__b__cpu.max": "max 100000\n", "a__cpu.max": "50000 100000\n"}, 0.5),
        ("0::/\n", {"cpu.max": "300000 100000\n"}, 3),
        ("0::/of/the/host\n", {"cpu.max": "300000 100000\n"}, 3),
        ("0::/a\n", {"a__cpu.max": "max 100000\n"}, inf),
        ("0::/a\n", {"a__cpu.max": "no numbers\n"}, inf),
        (
            "3:memory:/m\n2:cpu,cpuacct:/a\n0::/\n",
            {"cpu__a__cpu.cfs_quota_us": "200000\n", "cpu__a__cpu.cfs_period_us": "100000\n"},
            2,
        ),
        ("2:cpu:/a\n", {"cpu__a__cpu.cfs_quota_us": "-1\n", "cpu__a__cpu.cfs_period_us": "100000\n"}, inf),
    ],
)
def test_the_tightest_quota_of_the_control_groups_counts(tmp_path, table, files, cores):
    groups(tmp_path, table, **files)
    assert quota(tmp_path) == cores


def test_a_quota_below_one_core_still_leaves_one_thread(tmp_path):
    groups(tmp_path, "0::/\n", **{"cpu.max": "20000 100000"})
    assert usable_cores(tmp_path) == 1


def usage(seconds: float, own: float = 0.0, busy: float | None = None, load: float | None = None) -> CoreUsage:
    return CoreUsage(seconds=seconds, of_process=own, busy=busy, load=load)


def test_what_other_processes_use_is_not_free():
    before, after = usage(10.0, 3.0, 100.0), usage(12.0, 3.5, 101.5)
    found = shares(before, after)
    assert (found.of_process, found.free) == pytest.approx((0.25, min(usable_cores(), CORES - 0.5)))


def test_the_own_work_of_a_process_takes_no_core_from_it():
    assert shares(usage(0.0, 0.0, 0.0), usage(2.0, 4.0, 4.0)).free == usable_cores()


def test_cores_that_are_all_taken_are_none():
    assert shares(usage(0.0, 0.0, 0.0), usage(1.0, 0.0, 2.0 * CORES)).free == 0


def test_without_seconds_the_load_average_counts():
    assert shares(usage(0.0), usage(1.0, 1.0, load=1.5)).free == pytest.approx(min(usable_cores(), CORES - 0.5))


def test_a_system_that_says_nothing_leaves_it_open():
    assert shares(usage(0.0, busy=3.0), usage(1.0)) is None


def test_busy_seconds_are_those_of_the_own_cores_without_idle_ones(tmp_path):
    (tmp_path / "proc").mkdir()
    lines = [f"cpu{number} 100 20 30 4000 500 6 7 8 9 9" for number in range(max(affinity()) + 2)]
    (tmp_path / "proc/stat").write_text("\n".join(["cpu  1 1 1 1 1 1 1 1 1 1", *lines, "", "intr 15", "btime 5"]))
    assert CoreUsage.now(tmp_path).busy == pytest.approx(CORES * 171 / os.sysconf("SC_CLK_TCK"))


@pytest.mark.parametrize("text", [None, "", "cpu0\n", "cpu0 a b\n", "cpu0 0 0 0 0 0 0 0 0 0 0\n"])
def test_a_table_that_says_nothing_is_none(tmp_path, text):
    (tmp_path / "proc").mkdir()
    if text is not None:
        (tmp_path / "proc/stat").write_text(text)
    assert CoreUsage.now(tmp_path).busy is None


def test_this_machine_can_be_asked():
    before, after = CoreUsage.now(), CoreUsage.now()
    assert after.seconds >= before.seconds
    assert after.of_process >= before.of_process
    found = shares(before, after)
    assert found is None or 0 <= found.free <= usable_cores()
