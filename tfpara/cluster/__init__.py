"""The processes of a run: their identity, their messages, their failures; no TensorFlow."""

from tfpara.cluster.engines import left_alone
from tfpara.cluster.workers import (
    ALONE,
    RANK_VARIABLES,
    Cluster,
    ClusterError,
    is_evaluator,
    label,
    read,
    taking_part,
)

__all__ = [
    "ALONE",
    "RANK_VARIABLES",
    "Cluster",
    "ClusterError",
    "is_evaluator",
    "label",
    "left_alone",
    "read",
    "taking_part",
]
