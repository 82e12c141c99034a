"""The processes of a run: who takes part, how they meet, what failures mean; no TensorFlow."""

from tfpara.cluster.workers import (
    ALONE,
    RANK_VARIABLES,
    Cluster,
    ClusterError,
    label,
    read,
    taking_part,
)

__all__ = [
    "ALONE",
    "Cluster",
    "ClusterError",
    "RANK_VARIABLES",
    "label",
    "read",
    "taking_part",
]
