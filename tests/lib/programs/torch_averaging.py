"""Trains one replica by PyTorch's, torchft's or fairseq's averaging, where these are installed.

Its arguments are a folder, a system and a local optimizer. `given.npz` in the folder has the
network's first weights, and each step's minibatches of both replicas. TF_CONFIG has the place. The
trained weights go into `end-RANK.npz`.
"""

import contextlib
import importlib.util
import os
import sys
import types
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

from scripts.benchmarks.peers import process, torch_loops

PERIOD = 4
FAIRSEQ = importlib.util.find_spec("fairseq")


def post_local(model, optimizer):
    """As in docs/moving/pytorch.md."""
    averager = PeriodicModelAverager(period=PERIOD, warmup_steps=PERIOD - 1)
    return contextlib.nullcontext(PostLocalSGDOptimizer(optimizer, averager))


@contextlib.contextmanager
def torchft_local(model, optimizer):
    from torchft.local_sgd import LocalSGD

    manager = torch_loops._manager(model, {}, use_async_quorum=True)
    with LocalSGD(manager, model, optimizer, sync_every=PERIOD):
        yield optimizer


@contextlib.contextmanager
def torchft_diloco(model, optimizer, nesterov=True):
    from torchft.local_sgd import DiLoCo

    outer = torch.optim.SGD(model.parameters(), 0.7, momentum=0.5, nesterov=nesterov)
    manager = torch_loops._manager(model, {}, use_async_quorum=False)
    with DiLoCo(manager, [model], optimizer, outer, sync_every=PERIOD):
        yield optimizer


def torchft_slowmo(model, optimizer):
    return torchft_diloco(model, optimizer, nesterov=False)


def fairseq_bmuf(model, optimizer, nesterov=False):
    """Runs this file of fairseq alone: `import fairseq` needs packages that are not installed."""

    class FairseqOptimizer:
        def __init__(self, cfg):
            self.cfg, self.params = cfg, list(model.parameters())

    needed = {
        "dataclass.configs": {"FairseqBMUFConfig": None},
        "dataclass.utils": {"gen_parser_from_dataclass": None},
        "optim.fairseq_optimizer": {"FairseqOptimizer": FairseqOptimizer},
    }
    for name, contents in needed.items():
        module = sys.modules[f"fairseq.{name}"] = types.ModuleType(name)
        vars(module).update(contents)
    for package in ("fairseq", "fairseq.dataclass", "fairseq.optim"):
        sys.modules[package] = types.ModuleType(package)
    (folder,) = FAIRSEQ.submodule_search_locations
    text = Path(folder, "optim", "bmuf.py").read_text()
    exec(compile(text, "bmuf.py", "exec"), program := {"__name__": "bmuf"})
    settings = types.SimpleNamespace(
        global_sync_iter=PERIOD,
        block_momentum=0.5,
        block_lr=0.9,
        warmup_iterations=0,
        use_nbm=nesterov,
        average_sync=False,
        distributed_world_size=dist.get_world_size(),
    )
    return contextlib.nullcontext(program["FairseqBMUF"](settings, optimizer))


def fairseq_nesterov(model, optimizer):
    return fairseq_bmuf(model, optimizer, nesterov=True)


def main():
    folder, system, local = sys.argv[1:]
    torch.set_num_threads(1)
    rank, addresses = process.place()
    dist.init_process_group(
        "gloo", init_method=f"tcp://{addresses[0]}", rank=rank, world_size=len(addresses)
    )
    given = {
        name: torch.from_numpy(array) for name, array in np.load(f"{folder}/given.npz").items()
    }
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    with torch.no_grad():
        for k, parameter in enumerate(model.parameters()):
            parameter.copy_(given[f"weight{k}"].t())
    if local == "adam":
        optimizer = torch.optim.Adam(model.parameters(), 0.01, eps=1e-10)
    else:
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    with globals()[system](model, optimizer) as stepping:
        for x, y in zip(given["x"][:, rank], given["y"][:, rank], strict=True):
            stepping.zero_grad()
            ((model(x) - y) ** 2).mean().backward()
            stepping.step()
    np.savez(
        f"{folder}/end-{rank}.npz", *[each.detach().t().numpy() for each in model.parameters()]
    )
    os._exit(0)  # at a regular end torchft waits for the other replica


if __name__ == "__main__":
    main()
