"""The folder of a run: configuration, metrics, checkpoints, evaluations, tracking.

Training writes it; training, evaluation and reports read it, all through these modules.
"""
