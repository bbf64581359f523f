"""Benchmarks: every figure next to its peers, with machine, versions, commit and command."""
