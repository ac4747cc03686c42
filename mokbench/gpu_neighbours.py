"""What else of this machine gets at the GPUs of a run: another MPS daemon, a compute mode."""

import os
from collections.abc import Iterable, Iterator, Mapping

from mokbench.errors import ConfigError
from mokbench.fabric.mps_processes import (
    DEFAULT_PIPE,
    QUIT_DEFAULT,
    MpsProcess,
    mps_processes,
)
from mokbench.gpus import Gpus

# nvml.h, nvmlComputeMode_t, and what it does to ranks; 0 is the default.
COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}
_EFFECTS = {
    1: "a rank fails where another process holds the GPU",
    2: "no rank can use it",
    3: "a rank fails (busy or unavailable) where another process or MPS server holds the GPU",
}
SET_DEFAULT = "nvidia-smi -c DEFAULT allows several processes a GPU"


def compute_mode_effect(mode: int) -> str | None:
    """What a compute mode other than the default does to ranks; None for the default."""
    return _EFFECTS.get(mode, "unknown to mokbench") if mode else None


def mps_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that tie ranks to an MPS daemon or divide the GPU for them."""
    return {
        name: environment[name]
        for name in sorted(environment)
        if name.startswith("CUDA_MPS_") and name != "CUDA_MPS_LOG_DIRECTORY"
    }


def refuse_mps_variables(environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError where a rank would inherit them.

    A percentage divides the SMs once more than mokbench does, and a daemon that is not ours may
    have one of its own: figures of such ranks say nothing about this machine.
    """
    if found := mps_variables(environment):
        listed = " ".join(f"{name}={value}" for name, value in found.items())
        raise ConfigError(
            [
                f"{listed}: ranks of the cuda fabric would be measured through an MPS daemon or a "
                f"share of the GPU that is not mokbench's; run: unset {' '.join(found)}"
            ]
        )


def neighbours(gpus: Gpus) -> Iterator[str]:
    """What a run has to say about them before it starts."""
    if pids := daemons_of(DEFAULT_PIPE, mps_processes()):
        yield (
            f"an MPS daemon that is not mokbench's serves {DEFAULT_PIPE} (processes {pids}): ranks "
            f"with a GPU each become its clients; {QUIT_DEFAULT} ends it"
        )
    for gpu, mode in enumerate(gpus.compute_modes):
        if effect := compute_mode_effect(mode):
            name = COMPUTE_MODES.get(mode, str(mode))
            yield f"GPU {gpu} is in compute mode {name}: {effect}; {SET_DEFAULT}"


def daemons_of(pipe: str, processes: Iterable[MpsProcess]) -> str:
    """Their process ids; those whose folder cannot be read may be of any, so they count too."""
    return ", ".join(str(each.pid) for each in processes if each.pipe in (pipe, None))
