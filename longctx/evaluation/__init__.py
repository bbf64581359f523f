"""Evaluation: what a trained model makes of documents. Importing the package, or its config, does
not import torch.
"""
