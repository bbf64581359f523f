"""Training: the Lightning module, optimizer, checkpoints, metrics and run folders. The only package that knows Lightning."""
