"""What can be configured: one torch-free dataclass per group of keys."""
