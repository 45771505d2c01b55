"""`raydist plan`: what a job will do, worked out without a cluster."""
