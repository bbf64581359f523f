"""What a run computes, as values: parts of the model, one step, the machine. Free of torch."""
