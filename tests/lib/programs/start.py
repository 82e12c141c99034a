"""Starts TensorFlow's own multi-worker strategy under the guard, and adds up over the workers."""

import json
import os
import sys

options = json.loads(sys.argv[1])

from tfpara import cluster  # noqa: E402
from tfpara.cluster import startup  # noqa: E402

found = cluster.read()
startup._CONNECT_SECONDS = options.get("connect_seconds", 120.0)
try:
    with startup.guard(found, options["timeout_seconds"]):
        if options.get("dies"):
            os._exit(0)  # This worker ends after the meeting, before TensorFlow listens.
        import tensorflow as tf

        strategy = tf.distribute.MultiWorkerMirroredStrategy()
except startup.StartupError as error:
    sys.exit(f"StartupError: {error}")


@tf.function
def add_up() -> tf.Tensor:
    def replica() -> tf.Tensor:
        return tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(1.0))

    return strategy.run(replica)


print("sum", float(strategy.experimental_local_results(add_up())[0]))
with startup.guard(found, options["timeout_seconds"]):
    print("met before")
