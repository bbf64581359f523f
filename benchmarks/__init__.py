"""Benchmarks: every figure beside its peers in the same run, with machine, versions and command on
record.
"""
