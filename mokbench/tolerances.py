"""How far an output may be from the FP32 truth, for the oracle and for those who read rows."""

from mokbench.workload import Dtype

# Systems round gate, up, hidden and expert outputs to the dtype: bf16 then shows 0.004 to 0.006.
TOLERANCES = {Dtype.BF16: 8e-3, Dtype.FP32: 1e-5}

# E4M3 keeps three bits of the mantissa: what rounds to it is off by 2.5 % in the mean square.
DISPATCH_TOLERANCES = {"fp8": 6e-2}


def tolerance(dtype: Dtype, dispatch_dtype: str | None = None) -> float:
    """Greatest relative error that passes; rows may travel in less than ``dtype``."""
    return max(TOLERANCES[dtype], DISPATCH_TOLERANCES.get(dispatch_dtype or "", 0.0))
