"""`raydist tune`: short trials of a job in this process, to find its learning rate and micro-batch size."""
