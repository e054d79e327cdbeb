"""Which tensors of a checkpoint make which parameter, and how they get there."""
