"""Benchmarks: every figure beside its peers in the same process, with machine, versions and command
on record.
"""
