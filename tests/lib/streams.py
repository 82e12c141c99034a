"""Streams as they are read, for comparisons."""

import numpy as np

from input import streams
from input.streams import StreamOptions

SMALL = {"streams": 4, "truncation": 7}


def read(corpus, split="train", *, options=None, **changes):
    chosen = {"num_replicas": 1, "replica_ids": [0], "seed": 5, **changes}
    dataset = streams.minibatches(corpus, split, StreamOptions(**(options or SMALL)), **chosen)
    return [(x["frames"].numpy(), x["reset"].numpy(), y.numpy(), w.numpy()) for x, y, w in dataset]


def utterances(batches):
    """Returns the utterances of each stream, put together again from its batches."""
    found = []
    for row in range(len(batches[0][1])):
        pieces = []
        for frames, reset, labels, weights in batches:
            if reset[row]:
                pieces.append([])
            pieces[-1].append((frames[row], labels[row], weights[row]))
        for parts in pieces:
            whole = [np.concatenate(part) for part in zip(*parts, strict=True)]
            if whole[2].any():
                found.append(whole)
    return found
