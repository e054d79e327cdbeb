"""Triton kernels. All but limits.py import triton, as no other module does, and are imported when a kernel is made."""
