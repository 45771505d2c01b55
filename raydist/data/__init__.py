"""Where batches come from: the plan (which rows), and its readers."""
