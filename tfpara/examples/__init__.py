"""Programs to run, to read and to copy. They make up their own data.

    tfpara-launch -n 2 -- python -m tfpara.examples.cnn

Without the launcher each program runs in one process. A few lines in each differ from plain Keras:
docs/examples.md shows them. There are cnn, transformer, tabular, sequences, vae, loop, finetune,
classify, elastic and drill.
"""
