"""Tests of the Triton kernels."""
