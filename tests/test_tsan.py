"""ThreadSanitizer over the twin with ranks as threads: no race, and a relaxed publish is one."""

import shutil
import subprocess
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[1] / "kernels"
SOURCES = ["stress_main", "workspace", "mok_rank", "push_rank", "signal_rank", "shared_memory"]
RACE = 66  # ThreadSanitizer's exit status

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    """Name -> program: the twin as it is, and the mutant whose publishes are relaxed stores."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to build the ThreadSanitizer program with")
    folder = tmp_path_factory.mktemp("tsan")
    flags = ["-std=c++20", "-O1", "-fsanitize=thread", "-pthread", f"-I{KERNELS}"]
    probe = folder / "probe.cpp"
    probe.write_text("int main() { return 0; }\n", encoding="utf-8")
    made = subprocess.run(
        [compiler, *flags, str(probe), "-o", str(folder / "probe")], capture_output=True, text=True
    )
    if made.returncode != 0:
        pytest.skip(f"g++ cannot build with -fsanitize=thread: {made.stderr.strip()[-200:]}")
    started = run_program(folder / "probe")
    if started.returncode != 0:
        pytest.skip(f"ThreadSanitizer does not start here: {started.stderr.strip()[-200:]}")
    sources = [str(KERNELS / "host" / f"{source}.cpp") for source in SOURCES]
    defines = {"twin": [], "mutant": ["-DMOKBENCH_MUTANT_RELAXED_PUBLISH"]}
    building = {
        name: subprocess.Popen(
            [compiler, *flags, *extra, *sources, "-o", str(folder / name)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, extra in defines.items()
    }
    for process in building.values():
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    return {name: folder / name for name in defines}


def run_program(program, *arguments):
    """Without address-space randomisation where possible: older ThreadSanitizers need that."""
    command = [str(program), *map(str, arguments)]
    without = shutil.which("setarch")
    if without and subprocess.run([without, "-R", "true"], capture_output=True).returncode == 0:
        command = [without, "-R", *command]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("protocol", ["mok", "push", "signal"])
def test_no_race_and_right_results(builds, protocol, seed):
    element_bytes = 2 + 2 * (seed % 2)
    done = run_program(builds["twin"], protocol, 2 + seed, 12, element_bytes, seed)
    assert done.returncode == 0, done.stderr[:4000]
    assert "WARNING" not in done.stderr


@pytest.mark.parametrize("protocol", ["mok", "push", "signal"])
def test_relaxed_publish_is_reported(builds, protocol):
    done = run_program(builds["mutant"], protocol, 3, 12, 4, 1)
    assert done.returncode == RACE, (done.returncode, done.stderr[:4000])
    assert "ThreadSanitizer: data race" in done.stderr
