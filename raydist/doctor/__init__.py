"""`raydist doctor`: is this cluster fit to train on? One function for each check."""
