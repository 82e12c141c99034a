"""Trains a classifier while workers come and go.

    tfpara-launch -n 3 --elastic -- python -m tfpara.examples.elastic

Kill one of the workers (`kill -9`): the others train on, and the launcher restarts that worker.
"""

import argparse

import tensorflow as tf

import tfpara
from tfpara.examples.classify import network, points

BATCH = 32


def main() -> None:
    """Trains with workers that come and go."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--out", default="elastic", help="folder of what is written")
    options = parser.parse_args()

    strategy = tfpara.PeriodicSyncStrategy(
        tfpara.BMUF(),
        sync_period=10,
        averages={"ema": tfpara.EMA(0.9)},
        elastic=tfpara.Elastic(min_workers=1),
    )
    with strategy.scope():
        model = network()

    whole = points(10_000, seed=1)

    def minibatches(epoch: int) -> tf.data.Dataset:
        """Returns all minibatches of an epoch, each for one replica, in this epoch's order."""
        rows = tf.data.Dataset.from_tensor_slices(whole).shuffle(10_000, seed=epoch)
        return rows.batch(BATCH, drop_remainder=True)

    model.fit(
        strategy.minibatches_by_epoch(minibatches),
        epochs=options.epochs,
        validation_data=points(1_000, seed=2),
        validation_batch_size=1_000,
        callbacks=[tfpara.callbacks.Checkpoint(f"{options.out}/checkpoints", every_minutes=1)],
    )
    tfpara.export(model, f"{options.out}/model", which="ema")


if __name__ == "__main__":
    tfpara.run(main)
