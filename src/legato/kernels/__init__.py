"""The kernels of the fused decoder: native ones for the CPU (`native/`, `library.py`), and their twins in torch."""

from legato.kernels.choose import load_kernels

__all__ = ["load_kernels"]
