"""Tests of the native kernels, of every build that this processor can run."""
