"""`raydist sweep`: many trials of one job, on workers that stay warm."""
