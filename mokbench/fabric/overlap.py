"""The self-test of a shared GPU: ranks that wait for one another must run at the same time.

Cooperative launches under an MPS percentage were seen to run one after the other; a spin between
ranks then never ends. Nothing is measured before this test has passed.
"""

import ctypes

import torch

from mokbench import jit
from mokbench.device_kernel import DeviceKernel
from mokbench.errors import UnsupportedError
from mokbench.fabric.cuda import CudaFabric

# Ranks' launches are milliseconds apart; a spin must outlast that.
_SPIN_S = 0.05
# Starts were seen up to 3 ms apart, and whole runs to overlap for 49.8 to 50.0 ms. Much less means
# that some CTAs wait for SMs that others hold: kernels that wait for one another would too.
_MIN_OVERLAP_S = 0.8 * _SPIN_S
# A busy host can hold one rank's launch up for longer than that, but not every time.
_TRIES = 3
# More than half of an SM's 228 KiB, so that two CTAs cannot share one.
_SHARED_BYTES = 120 * 1024


class OverlapArgs(ctypes.Structure):
    """OverlapArgs of overlap.cuh."""

    _fields_ = (
        ("spin_ns", ctypes.c_uint64),
        ("began_ns", ctypes.c_uint64),
        ("ended_ns", ctypes.c_uint64),
    )


def overlap_s(fabric: CudaFabric, num_ctas: int) -> float:
    """Seconds during which all CTAs of all ranks of this rank's GPU ran; negative when never.

    Collective over all ranks; every rank launches ``num_ctas`` CTAs that take an SM each.
    """
    cubin = jit.build("overlap.cuh", "mokbench::overlap_probe", fabric.arch)
    kernel = DeviceKernel(cubin, _SHARED_BYTES)
    times = torch.zeros(2, num_ctas, dtype=torch.int64, device=fabric.device)
    arguments = OverlapArgs(int(_SPIN_S * 1e9), times[0].data_ptr(), times[1].data_ptr())
    torch.cuda.synchronize()
    fabric.barrier()
    stream = torch.cuda.current_stream().cuda_stream
    kernel.launch(num_ctas, 32, [arguments], stream, cooperative=True)
    torch.cuda.synchronize()
    began_ns, ended_ns = int(times[0].max()), int(times[1].min())
    by_rank = fabric.gather((fabric.device.index, began_ns, ended_ns))
    mine = [(began, ended) for gpu, began, ended in by_rank if gpu == fabric.device.index]
    together_ns: int = min(ended for _, ended in mine) - max(began for began, _ in mine)
    return together_ns / 1e9


def require_overlap(fabric: CudaFabric) -> float:
    """The least overlap of any GPU's ranks with the SMs as they are shared; collective.

    Raises UnsupportedError when it is never nearly whole.
    """
    for _ in range(_TRIES):
        found: float = min(fabric.gather(overlap_s(fabric, fabric.num_sms)))
        if found >= _MIN_OVERLAP_S:
            break
    else:
        seen = f"at the same time for {found * 1e3:.1f} of {_SPIN_S * 1e3:.0f} ms only"
        if found <= 0:
            seen = f"one after the other ({-found * 1e3:.1f} ms apart)"
        raise UnsupportedError(
            f"{fabric.ranks_per_gpu} ranks share a GPU, but their kernels ran {seen}: waits "
            "between ranks would last, or never end. Is the MPS daemon running for all of them, "
            "no CUDA_MPS_ACTIVE_THREAD_PERCENTAGE set, and no other program on the GPU?"
        )
    return found
