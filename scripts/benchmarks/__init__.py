"""Benchmarks: `python -m scripts.benchmarks --suite=SUITE --out=FILE.json`.

This file imports nothing, since the processes of peers run in environments without TensorFlow and
absl.
"""
