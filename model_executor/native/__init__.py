"""Kernels in C for the CPU, without torch: their library, and how the registry's operators call it."""
