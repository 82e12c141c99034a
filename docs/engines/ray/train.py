"""Trains with Ray: `python train.py FOLDER [WORKERS]`. Started again, it goes on.

FOLDER is one that all nodes share, by the same name. `touch FOLDER/leave` ends the training with a
checkpoint.
"""

import pathlib
import sys

MINIBATCHES, SIZE = 40, 32


def train(folder, callbacks=()):
    """What each worker does; nothing in it is Ray's.

    Args:
        folder: of the checkpoints, and of the model at the end.
        callbacks: more of them for `fit`.

    Returns:
        Whether the training is complete; else it was asked to leave.
    """
    import keras  # not tf.keras, which Ray sets to be Keras 2
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
        return False  # the process is Ray's to end
    model.save(folder / "model.keras")
    return True


def run(function, folder, workers):
    """Has Ray call a function in each worker; returns what it has returned in the first."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.tensorflow import TensorflowTrainer

    trainer = TensorflowTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=3)
        ),
    )
    return trainer.fit().return_value


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    try:
        import ray
    except ImportError:
        sys.exit('Ray is not installed: pip install "ray[train]"')

    ray.init()
    folder = pathlib.Path(sys.argv[1]).absolute()
    workers = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    complete = run(lambda: train(folder), folder, workers)
    left = f"Left, with a checkpoint. To go on, remove {folder}/leave, and start it again."
    print("Complete." if complete else left)
    ray.shutdown()
