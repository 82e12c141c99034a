"""Programs to run, to read and to copy. They make up their own data.

    tfpara-launch -n 2 -- python -m tfpara.examples.cnn

Without the launcher each program runs in one process. A few lines in each differ from plain Keras:
docs/examples.md shows them.

| program | what it trains |
|---|---|
| `cnn` | a convolutional network, with layers that augment the images |
| `transformer` | a transformer: AdamW, cosine schedule, mixed precision, clipped gradients |
| `tabular` | a model of numbers and words, with preprocessing that is learned from the data |
| `sequences` | a GRU on sequences of different length, with masks and sample weights |
| `vae` | a model with a `train_step` of its own |
| `loop` | a model in a custom loop, without `fit` |
| `finetune` | a trained network on few data: first a new head, then all layers |
| `classify` | a classifier, with checkpoints, averages and an export |
| `elastic` | the same classifier, on workers that come and go |
| `drill` | a model that counts minibatches, while `tfpara-chaos` makes faults |
"""
