"""Kernels: how attention runs. The only user of Triton, which is imported when the first kernel is launched."""
