"""Programs to run, to read and to copy, on data that they make up.

    tfpara-launch -n 2 -- python -m tfpara.examples.cnn

Without the launcher each runs in one process. Beside plain Keras, each has a few lines more:
docs/examples.md shows them.

| program | what it trains |
|---|---|
| `cnn` | a convolutional network, with layers that change its images |
| `transformer` | AdamW, a cosine schedule, mixed precision, clipped gradients |
| `tabular` | numbers and words, by preprocessing that is learned from the data |
| `sequences` | a GRU on sequences of different length, with masks and sample weights |
| `vae` | a model with a `train_step` of its own |
| `loop` | a loop of one's own, without `fit` |
| `finetune` | a trained network on few data: its head first, then all of it |
| `classify` | checkpoints, averages, an export |
| `elastic` | workers that come and go |
| `drill` | counts minibatches, while `tfpara-chaos` makes faults |
"""
