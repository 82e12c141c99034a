"""Synchronisation rules and averages: pure functions over flat arrays.

Every rule is a frozen dataclass with pure methods, written with plain arithmetic only, so
that the same code runs on NumPy arrays (tests, simulation) and on TensorFlow tensors (clusters):

* ``init(weights) -> state``: the state (a NamedTuple of arrays) of a run that starts at `weights`;
* ``update(state, average, num_replicas, share=1.0) -> state``: the global step, given the
  sample-weighted mean of the local models; `share` is the part of a whole block that this one was;
* ``broadcast(before, after) -> array``: what the replicas need to go on, given the state before and
  after the global step; all of them receive the same;
* ``restart(local, broadcast) -> weights``: the weights a replica goes on from;
* ``measured_from(state, received) -> array``: the point that the mean of the replicas' differences
  from `received` is added to, where only these differences travel (`tfpara.sync.compression`). A
  rule that overwrites the replicas names the exact point that it broadcast, of which they have
  received a rounded copy; a rule that leaves them their weights names that copy;
* ``restart_delayed(local, snapshot, broadcast) -> weights``: the same where the replica has gone on
  training since the sync began at `snapshot`, and is now at `local`. None: the rule has no such
  form, and its syncs cannot overlap training.

All of it works element by element, so a rule may be applied to any part of the weights.

A block that is closed before its time (an epoch ends) is a share f < 1 of a whole one, and takes
that share of the step which the block, gone on at the same pace, would have taken. With s the state
and B the point that the replicas started from,

    s ← s + f (step of s with the average B + (w̄ − B)/f − s)

A whole block is f = 1. So w̄ − B moves the model in the end as far as it would in a whole block,
momentum lasts as many minibatches, and averages weigh a global model by its f.

``resolve(num_replicas)`` fills in defaults that depend on the number of replicas and refuses
hyper-parameters that are unstable for it.
"""

from tfpara.algorithms.asgd import ASGD, AsyncEASGD, AveragedASGD, Downpour, RunningThenMean
from tfpara.algorithms.averages import EMA, MA
from tfpara.algorithms.bmuf import BMUF
from tfpara.algorithms.bmuf_adam import BMUFAdam
from tfpara.algorithms.bsp import BSP
from tfpara.algorithms.easgd import EASGD
from tfpara.algorithms.outer import DiLoCo, Outer, SlowMo

RULES = (BSP, BMUF, BMUFAdam, EASGD, Outer)
ASYNC_RULES = (ASGD, AveragedASGD, Downpour, AsyncEASGD)
AVERAGES = (EMA, MA)

__all__ = [
    "ASGD",
    "ASYNC_RULES",
    "AVERAGES",
    "AsyncEASGD",
    "AveragedASGD",
    "BMUF",
    "BMUFAdam",
    "BSP",
    "DiLoCo",
    "Downpour",
    "EASGD",
    "EMA",
    "MA",
    "Outer",
    "RULES",
    "RunningThenMean",
    "SlowMo",
]
