"""Benchmarks: `python -m scripts.benchmarks --suite=SUITE --out=FILE.json`.

Nothing is imported here, since the peers' processes run in environments without TensorFlow and
absl.
"""
