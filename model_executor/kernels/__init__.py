"""Triton kernels. Only these modules import triton, and they are imported only when a kernel is made."""
