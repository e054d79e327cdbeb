"""The executor: device, weights, KV tensors, kernels and sampling."""
