"""What can be configured: one dataclass per group of keys. Imports neither torch nor Hydra."""
