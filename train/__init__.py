"""The command line, the configuration and the training loop."""
