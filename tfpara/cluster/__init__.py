"""Who takes part in a run, how they meet, and what it means when one fails; free of TensorFlow."""

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
