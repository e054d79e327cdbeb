"""Attention kernels on the paged cache, and the registry that chooses among them."""
