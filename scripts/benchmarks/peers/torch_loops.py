"""PyTorch's peers: one process, DDP, two periodic averagers, torchft's LocalSGD and DiLoCo.

This program runs in an environment that has PyTorch. Gloo connects the processes.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from scripts.benchmarks.peers import process

_TIMEOUT = datetime.timedelta(seconds=120)


def main(options: dict[str, Any]) -> dict[str, Any]:
    """Runs the training loop that `options["system"]` names."""
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    torch.manual_seed(0)
    rank, addresses = process.place()
    if len(addresses) > 1:
        # Rank 0 serves the key-value store by which the processes find each other. The store's
        # address is that of rank 0 in TF_CONFIG.
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{addresses[0]}",
            rank=rank,
            world_size=len(addresses),
            timeout=_TIMEOUT,
        )
    system = {
        "plain": _plain,
        "ddp": _ddp,
        "averager": _averager,
        "post_local": _post_local,
        "torchft_local": _torchft_local,
        "torchft_diloco": _torchft_diloco,
    }[options["system"]]
    model = _model(options)
    setup = system(model, options)
    step = next(setup)
    return process.timed_training(options, step, lambda: _norm(model))


# A set-up is a generator that yields the function for a training step. The generator also makes
# other objects. They live as long as the generator, which `main` keeps until the training ends.
_Setup = Iterator[Callable[[], Any]]


def _plain(model: nn.Module, options: dict[str, Any]) -> _Setup:
    yield _stepper(model, _optimizer(model), options)


def _ddp(model: nn.Module, options: dict[str, Any]) -> _Setup:
    parallel = nn.parallel.DistributedDataParallel(model)
    yield _stepper(parallel, _optimizer(parallel), options)


def _averager(model: nn.Module, options: dict[str, Any]) -> _Setup:
    averager = PeriodicModelAverager(period=options["sync_period"])
    local = _stepper(model, _optimizer(model), options)

    def step() -> None:
        local()
        averager.average_parameters(model.parameters())

    yield step


def _post_local(model: nn.Module, options: dict[str, Any]) -> _Setup:
    """Sets up post-local SGD, local from the first step on, as the other periodic systems are."""
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hook
    from torch.distributed.optim import PostLocalSGDOptimizer

    parallel = nn.parallel.DistributedDataParallel(model)
    state = hook.PostLocalSGDState(
        process_group=None,
        subgroup=dist.new_subgroups(1)[0],  # a group with only this process
        start_localSGD_iter=0,
        post_local_gradient_allreduce=False,
    )
    parallel.register_comm_hook(state, hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=options["sync_period"], warmup_steps=0)
    optimizer = PostLocalSGDOptimizer(optim=_optimizer(parallel), averager=averager)
    yield _stepper(parallel, optimizer, options)


def _torchft_local(model: nn.Module, options: dict[str, Any]) -> _Setup:
    from torchft.local_sgd import LocalSGD

    optimizer = _optimizer(model)
    manager = _manager(model, options, use_async_quorum=True)
    with LocalSGD(manager, model, optimizer, sync_every=options["sync_period"]):
        yield _stepper(model, optimizer, options)


def _torchft_diloco(model: nn.Module, options: dict[str, Any]) -> _Setup:
    from torchft.local_sgd import DiLoCo

    inner = _optimizer(model)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    manager = _manager(model, options, use_async_quorum=False)
    with DiLoCo(manager, [model], inner, outer, sync_every=options["sync_period"]):
        yield _stepper(model, inner, options)


def _manager(model: nn.Module, options: dict[str, Any], use_async_quorum: bool) -> Any:
    """Makes torchft's manager of this replica group of one process; rank 0 runs the lighthouse."""
    from torchft.coordination import LighthouseServer
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    rank, addresses = process.place()
    host = addresses[rank].rpartition(":")[0]
    found = [None]
    if rank == 0:
        _manager.lighthouse = LighthouseServer(bind="[::]:0", min_replicas=len(addresses))
        port = _manager.lighthouse.address().rpartition(":")[2]
        found = [f"http://{host}:{port}"]
    dist.broadcast_object_list(found, src=0)
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    _manager.store = store
    return Manager(
        pg=ProcessGroupGloo(timeout=_TIMEOUT),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=len(addresses),
        use_async_quorum=use_async_quorum,
        timeout=_TIMEOUT,
        quorum_timeout=_TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        lighthouse_addr=found[0],
        replica_id=f"replica_{rank}",
        hostname=host,
        init_sync=False,  # not needed: all begin with equal weights, from the same seed
    )


def _stepper(model: nn.Module, optimizer: Any, options: dict[str, Any]) -> Callable[[], None]:
    """Returns a function that trains one minibatch by SGD with momentum, or that only waits."""
    if "pause_seconds" in options:
        zeros = [torch.zeros_like(weight) for weight in model.parameters()]

        def pause() -> None:
            time.sleep(options["pause_seconds"])
            optimizer.zero_grad()
            # No weight has a gradient now, so this call changes no weight. It is needed because
            # torchft counts the steps of the optimizer.
            optimizer.step()
            # Each weight gets a gradient, because PyTorch's averagers leave out weights that have
            # none.
            for weight, zero in zip(model.parameters(), zeros, strict=True):
                weight.grad = zero

        return pause
    generator = torch.Generator().manual_seed(process.place()[0])
    x = torch.randn(options["batch"], options["inputs"], generator=generator)
    y = torch.randint(options["classes"], (options["batch"],), generator=generator)
    loss = nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()

    return step


def _norm(model: nn.Module) -> float:
    """Returns the norm of the weights."""
    squares = [weight.detach().double().pow(2).sum() for weight in model.parameters()]
    return float(torch.stack(squares).sum().sqrt())


def _model(options: dict[str, Any]) -> nn.Module:
    widths = [options["inputs"], *[options["width"]] * options["layers"]]
    hidden = [
        module
        for before, after in zip(widths, widths[1:], strict=False)
        for module in (nn.Linear(before, after), nn.ReLU())
    ]
    return nn.Sequential(*hidden, nn.Linear(widths[-1], options["classes"]))


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=process.LEARNING_RATE, momentum=process.MOMENTUM)


if __name__ == "__main__":
    process.run(main)
