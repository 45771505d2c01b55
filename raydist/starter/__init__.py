"""`raydist init`: a job file and a task file from a look at the data."""
