"""The control channel of an asynchronous run: start, signs of life, failures, and the end."""
