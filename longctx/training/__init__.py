"""Training: Lightning module, optimizer, checkpoints, metrics, run folders. The only user of
Lightning.
"""
