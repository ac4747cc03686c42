"""mokbench: does a MoK-style MoE megakernel beat dispatch, grouped GEMM and combine, and why?"""

__version__ = "0.1.0"
