"""Synchronous runs: replicas that train independently and are averaged every τ minibatches."""
