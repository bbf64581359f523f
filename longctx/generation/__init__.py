"""Text from a trained model: `longctx generate`."""
