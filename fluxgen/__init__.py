"""fluxgen: generated, tuned, fused communication-GEMM kernels for tensor parallelism."""

__version__ = "0.1.0"
