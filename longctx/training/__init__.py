"""Training: Lightning module, optimizers, checkpoints, metrics, run folders. The only user of
Lightning.
"""
