"""A process of an asynchronous run with TensorFlow: workers count in variables of the ps."""

import os
import sys
import time

from tfpara.cluster import asynchronous as cluster

STARTUP_SECONDS, TIMEOUT_SECONDS = map(float, sys.argv[1:3])
found = cluster.read()

import tensorflow as tf  # noqa: E402

from tfpara.parameter_server import processes  # noqa: E402
from tfpara.parameter_server.control.lobby import Lobby, ParameterServerError  # noqa: E402

if not found.is_chief:
    processes.serve_forever(found, STARTUP_SECONDS)

lobby = Lobby(found, STARTUP_SECONDS, TIMEOUT_SECONDS)
lobby.gather()
resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
    tf.train.ClusterSpec(found.spec(lobby.tensorflow_address)),
    task_type="chief",
    task_id=0,
    rpc_layer="grpc",
)
# The tests' proxy: this program starts TensorFlow by itself.
os.environ.pop("https_proxy", None)
coordinator = tf.distribute.coordinator.ClusterCoordinator(
    tf.distribute.ParameterServerStrategy(resolver)
)
counters = []
for index in range(len(found.jobs["ps"])):
    with tf.device(f"/job:ps/replica:0/task:{index}"):
        counters.append(tf.Variable(0, dtype=tf.int64))


@tf.function
def add(times: tf.Tensor) -> tf.Tensor:
    for _ in tf.range(times):
        for counter in counters:
            counter.assign_add(1)
    return times


def run(pieces: int, times: int) -> None:
    for _ in range(pieces):
        coordinator.schedule(add, args=(tf.constant(times),))
    while not coordinator.done():
        lobby.check()
        time.sleep(0.01)


def go_on() -> None:
    run(4, 50)
    print("counted", *(int(counter.numpy()) for counter in counters), flush=True)
    if len(sys.argv) > 3:  # until someone ends it, or all is well again
        while not lobby.state.asked_to_end:
            lobby.check()
            run(1, 1)
            there = sorted(index for job, index in lobby.state.serving if job == "worker")
            print("alive", *there, flush=True)
            time.sleep(0.05)


try:
    go_on()
except (ParameterServerError, tf.errors.OpError):
    # TensorFlow may find a broken connection before the lobby does.
    while lobby.state.failure is None:
        time.sleep(0.01)
    lobby.fail(lobby.state.failure)  # which waits until the others have ended
    print(lobby.state.failure, flush=True)
    os._exit(1)  # TensorFlow's own end may wait for them
lobby.fail("", 0)
sys.stdout.flush()
os._exit(0)
