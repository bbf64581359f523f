"""Kernels between the matmuls: norm, rotary, SwiGLU, loss, AdamW, eight-bit copies, linear."""
