"""Evaluation of a trained model: perplexity, loss by position, what a longer context buys, pass
keys, and the tasks of lm-evaluation-harness. Importing this package does not import torch.
"""
