"""`sluice bench gpu`: correctness and speed of one GPU, in one command."""
