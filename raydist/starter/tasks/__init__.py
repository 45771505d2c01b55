"""The task files that `raydist init` copies beside the job file it writes."""
