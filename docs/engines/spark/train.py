"""Trains with Spark: `python train.py FOLDER [WORKERS]`. Started again, it goes on.

FOLDER is one that all nodes share, by the same name. `touch FOLDER/leave` ends the training with a
checkpoint.
"""

import pathlib
import sys

MINIBATCHES, SIZE = 40, 32


def train(folder, callbacks=()):
    """What each worker does; nothing in it is Spark's.

    Args:
        folder: of the checkpoints, and of the model at the end.
        callbacks: more of them for `fit`.

    Returns:
        Whether the training is complete; else it was asked to leave.
    """
    import keras
    import numpy as np
    import tensorflow as tf

    import tfpara

    strategy = tfpara.PeriodicSyncStrategy(tfpara.BMUF(), sync_period=4)
    x = np.random.default_rng(0).normal(size=(MINIBATCHES, SIZE, 20)).astype("float32")

    def of_this_worker(epoch, first):
        order = np.random.default_rng([1, epoch]).permutation(MINIBATCHES)[first:]
        mine = np.isin(np.arange(len(order)) % strategy.num_replicas, strategy.local_replica_ids)
        minibatches = x[order[mine]]
        return tf.data.Dataset.from_tensor_slices((minibatches, minibatches[:, :, :3]))

    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse")
    folder = pathlib.Path(folder)
    checkpoint = tfpara.callbacks.Checkpoint(
        folder / "checkpoints", every_syncs=2, termination_watcher=(folder / "leave").exists
    )
    data = strategy.datasets_by_epoch(of_this_worker)
    try:
        model.fit(data, epochs=4, callbacks=[*callbacks, checkpoint], verbose=0)
    except tfpara.callbacks.Preempted:
        return False  # the process is Spark's to end
    model.save(folder / "model.keras")
    return True


def run(function, workers, max_failures=3):
    """Has Spark call a function in so many tasks at once; again, if one of them has failed.

    Returns:
        What the first task has returned.
    """
    from py4j.protocol import Py4JJavaError
    from spark_tensorflow_distributor import MirroredStrategyRunner

    runner = MirroredStrategyRunner(num_slots=workers, use_gpu=False, use_custom_strategy=True)
    for _ in range(max_failures):
        try:
            return runner.run(function)
        except Py4JJavaError:
            print("A task has failed. All are started again.", file=sys.stderr, flush=True)
    return runner.run(function)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    try:
        import spark_tensorflow_distributor  # noqa: F401
        from pyspark.sql import SparkSession
    except ImportError:
        sys.exit("Spark is not installed: pip install pyspark spark-tensorflow-distributor")

    folder = pathlib.Path(sys.argv[1]).absolute()
    workers = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    # TensorFlow serves one cluster in the life of a process, so each training needs new ones.
    spark = SparkSession.builder.config("spark.python.worker.reuse", "false").getOrCreate()
    complete = run(lambda: train(folder), workers)
    left = f"Left, with a checkpoint. To go on, remove {folder}/leave, and start it again."
    print("Complete." if complete else left)
    spark.stop()
