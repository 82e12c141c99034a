"""The systems that the benchmark measures beside tfpara, each in processes of its own.

Each system trains the same network on one minibatch in memory, as a user of the system would write
it. scripts.benchmarks.beside_peers starts them, those of PyTorch in an environment of their own.
"""
