"""The folder of a run: configuration, metrics, checkpoints, tracking. Written by training, read by all."""
