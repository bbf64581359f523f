"""Training: how a run is decided, its loop and steps, optimizers, validation, saving, resuming."""
