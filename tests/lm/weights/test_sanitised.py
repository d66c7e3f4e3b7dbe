"""No kernel touches memory that is not its own, or does what C++ leaves undefined."""

import subprocess
from pathlib import Path

import pytest

from outrider.host import native
from outrider.lm import weights
from outrider.lm.forwards import gated

KERNELS = Path(weights.__file__).with_name("kernels.cpp")


@pytest.mark.slow
def test_no_kernel_touches_memory_of_others(tmp_path: Path) -> None:
    compiler = native._compiler()
    flags = ["-std=c++17", "-O0", "-fopenmp", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    (tmp_path / "empty.cpp").write_text("int main() {}")
    checks = [compiler or "c++", *flags, str(tmp_path / "empty.cpp"), "-o", str(tmp_path / "empty")]
    if compiler is None or subprocess.run(checks, capture_output=True).returncode:
        pytest.skip("no C++ compiler with sanitizers")
    flags.append(native._flags()[-1])
    for source in (KERNELS.with_name("panels.cpp"), KERNELS.with_name("fits.cpp"), gated.SOURCE):
        subprocess.run([compiler, *flags, "-c", str(source)], check=True, cwd=tmp_path)
    program = str(Path(__file__).with_name("every_kernel.cpp"))
    command = [compiler, *flags, "-include", str(KERNELS), program, "panels.o", "fits.o", "gated.o", "-o", "all"]
    subprocess.run(command, check=True, cwd=tmp_path)
    # What OpenMP and the vectors of a thread keep until the end is no leak.
    environment = {"OMP_NUM_THREADS": "2", "ASAN_OPTIONS": "detect_leaks=0"}
    run = subprocess.run([str(tmp_path / "all")], env=environment, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "all ran\n"), run.stderr
