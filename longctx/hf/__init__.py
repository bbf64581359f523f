"""Models of others: those that transformers computes, and folders of the Hugging Face Hub."""
