"""What fits a machine, and how fast it runs: predictions that need neither a GPU nor torch."""
