"""Programs of other libraries beside ours, as the diffs of the pages make them."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest

import tfpara
from tests.lib import examples
from tests.lib.cluster_of_processes import finished, free_ports, tf_config
from tests.lib.horovod_here import needs_horovod
from tests.lib.launched import DEADLINE, launch
from tests.lib.moving import HOROVOD_LOOP, TORCH
from tests.lib.small import compiled_net, strategy_of

# PyTorch, torchft and fairseq need an environment of their own: see CONTRIBUTING.md.
TORCH_PYTHON = os.environ.get("TFPARA_TORCH_PYTHON")
needs_torch = pytest.mark.skipif(
    not TORCH_PYTHON,
    reason="TFPARA_TORCH_PYTHON names no python that has torch, torchft and fairseq",
)


@pytest.mark.nightly
@needs_horovod
def test_the_loop_of_horovod_learns_as_ours_does(tmp_path):
    (tmp_path / "theirs.py").write_text(examples.other("loop", HOROVOD_LOOP))
    start = ("-n", 2, "--collectives=horovod", "--threads", 1, "--", sys.executable)
    code, said, errors = launch(*start, "theirs.py", "--epochs=6", cwd=tmp_path)
    assert code == 0, errors
    theirs = examples.learned("loop", said)
    code, said, errors = launch(*start, "-m", "tfpara.examples.loop", "--epochs=6", cwd=tmp_path)
    assert code == 0, errors
    assert min(theirs, examples.learned("loop", said)) > 0.9


@pytest.mark.nightly
@needs_torch
def test_the_loop_of_pytorch_learns_as_ours_does(tmp_path):
    (tmp_path / "theirs.py").write_text(examples.other("loop", TORCH))
    start = [TORCH_PYTHON, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    said = subprocess.run(
        [*start, "theirs.py", "--epochs=6"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=DEADLINE,
        check=True,
    ).stdout
    assert (tmp_path / "loop.pt").exists()
    code, ours, errors = launch(
        *("-n", 2, "--threads", 1, "--", sys.executable),
        *("-m", "tfpara.examples.loop", "--epochs=6"),
        cwd=tmp_path,
    )
    assert code == 0, errors
    assert min(examples.learned("loop", said), examples.learned("loop", ours)) > 0.9


LOCAL = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01, epsilon=1e-10),
}


@pytest.mark.nightly
@needs_torch
@pytest.mark.parametrize(
    ("system", "rule", "local"),
    [
        ("post_local", tfpara.BSP(), "sgd"),
        ("post_local", tfpara.BSP(), "adam"),
        ("torchft_local", tfpara.BSP(), "sgd"),
        ("torchft_local", tfpara.BSP(), "adam"),
        ("torchft_diloco", tfpara.DiLoCo(0.7, 0.5), "sgd"),
        ("torchft_diloco", tfpara.DiLoCo(0.7, 0.5), "adam"),
        ("torchft_slowmo", tfpara.SlowMo(0.7, 0.5), "sgd"),
        ("fairseq_bmuf", tfpara.BMUF(0.5, 0.9, nesterov=False, compat="fairseq"), "sgd"),
        ("fairseq_nesterov", tfpara.BMUF(0.5, 0.9, compat="fairseq"), "sgd"),
        ("fairseq_nesterov", tfpara.BMUF(0.5, 0.9, compat="fairseq"), "adam"),
    ],
)
def test_weights_are_those_of_the_other_library(system, rule, local, tmp_path):
    """Two replicas take 24 steps from the same start, on the same minibatches."""
    random = np.random.default_rng(3)
    x = random.normal(size=(24, 2, 8, 4)).astype("float32")  # steps, replicas, rows, columns
    y = np.sin(x.sum(-1, keepdims=True)) + np.array([0.0, 1.0], "float32")[:, None, None]
    strategy = strategy_of(2, rule, sync_period=4, local_state="keep")
    model = compiled_net(strategy, 4, 8, 1, optimizer=LOCAL[local], activation="tanh")
    start = model.get_weights()
    weights = {f"weight{k}": weight for k, weight in enumerate(start)}
    np.savez(tmp_path / "given.npz", x=x, y=y, **weights)
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    command = (TORCH_PYTHON, "-m", "tests.lib.programs.torch_averaging", tmp_path, system, local)
    workers = [
        subprocess.Popen(
            command,
            cwd=examples.ROOT,
            env=os.environ | {"TF_CONFIG": tf_config(addresses, rank), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    finished(workers, DEADLINE)
    model.fit(x.reshape(-1, 4), y.reshape(-1, 1), batch_size=16, shuffle=False, verbose=0)
    for rank in range(2):
        theirs = list(np.load(tmp_path / f"end-{rank}.npz").values())
        for began, ended, weight in zip(start, theirs, model.get_weights(), strict=True):
            assert np.abs(ended - began).max() > 0.02
            np.testing.assert_allclose(weight, ended, rtol=1e-4, atol=2e-6)
