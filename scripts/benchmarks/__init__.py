"""Cost, measured: `python -m scripts.benchmarks --suite=SUITE --out=FILE.json`.

Nothing is imported here: the peers' processes run in environments that have neither TensorFlow nor
absl.
"""
