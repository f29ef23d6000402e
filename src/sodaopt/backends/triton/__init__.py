"""Triton kernels. Each launch handles many tensors, which must not share memory."""
