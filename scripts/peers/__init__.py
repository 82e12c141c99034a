"""The systems that the benchmark puts beside tfpara, each a process of its own.

Each trains the same network on one minibatch in memory, as a user of that system would write it.
Started by scripts.benchmark_peers; the processes of PyTorch run in an environment of their own.
"""
