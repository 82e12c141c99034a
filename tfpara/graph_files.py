"""SavedModels as files that any process can load."""

from __future__ import annotations

import os
import re

import tensorflow as tf

# The protocol buffer of a SavedModel file. TensorFlow has no public name for it.
from tensorflow.core.protobuf import saved_model_pb2

from tfpara.dataset_graph import all_nodes

_TASK = re.compile(r"^/job:[^/]+/replica:\d+/task:\d+")


def without_tasks(folder: str | os.PathLike[str]) -> None:
    """Removes the task of the cluster from the devices of a SavedModel's operations.

    TensorFlow writes the task for tables, such as that of an adapted StringLookup. A process of
    another task that loads the file would place the operation on the task that wrote it.
    """
    path = os.path.join(folder, "saved_model.pb")
    if not tf.io.gfile.exists(path):
        return  # the model is saved in another format
    with tf.io.gfile.GFile(path, "rb") as file:
        saved = saved_model_pb2.SavedModel.FromString(file.read())
    changed = False
    for node in (node for meta in saved.meta_graphs for node in all_nodes(meta.graph_def)):
        device = _TASK.sub("", node.device)
        changed |= device != node.device
        node.device = device
    if changed:
        with tf.io.gfile.GFile(path, "wb") as file:
            file.write(saved.SerializeToString(deterministic=True))
