"""A synchronous run: replicas that train by themselves and meet every few minibatches."""
