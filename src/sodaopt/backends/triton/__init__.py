"""Triton kernels. Each launch covers many tensors, which must not share memory."""
