"""What needs a CUDA device to be checked; run by scripts/gpu_check."""
