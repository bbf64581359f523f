"""Attention: portable Triton, Hopper, tiles for CPUs, decoding, and what makes them trusted."""
