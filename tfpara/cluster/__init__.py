"""Who takes part in a run, how they meet, and what it means when one fails; free of TensorFlow."""

from tfpara.cluster.workers import ALONE as ALONE
from tfpara.cluster.workers import RANK_VARIABLES as RANK_VARIABLES
from tfpara.cluster.workers import Cluster as Cluster
from tfpara.cluster.workers import ClusterError as ClusterError
from tfpara.cluster.workers import label as label
from tfpara.cluster.workers import read as read
from tfpara.cluster.workers import taking_part as taking_part
