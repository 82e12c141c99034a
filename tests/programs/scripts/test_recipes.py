"""Every recipe runs: one after the other in one process, on a tiny corpus and scaled down."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.lib import warm

# The first test waits for all of them.
pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[3]
RECIPES = sorted(p.stem for p in (ROOT / "scripts" / "recipes").glob("*.flags"))
# Those that others include, or for another program.
PARTS = ("000", "003", "001-pretrain")
# Made of the lines of two others, which are trained: the network's and the rule's.
MIXED = {
    "003-cldnn-bsp": ("003-cldnn-bmuf", "003-dnn-bsp"),
    "003-cldnn-easgd": ("003-cldnn-bmuf", "003-dnn-easgd"),
    "003-dnn-bmuf": ("003-dnn-bsp", "003-cldnn-bmuf"),
}
# Of a network that another recipe trains: these train a tiny one.
SHARED = ("001-newbob", "002-adapt", "002-hand", "002-multipass")
SHARED += ("003-dnn-asgd", "003-dnn-easgd", "003-dnn-easgd-async")
# 001 trains from its RBMs, in a test of its own; 001-newbob, which includes it, without them.
_TRAINS = "test_a_recipe_trains"
TRAINED = [name for name in RECIPES if name not in (*PARTS, *MIXED, "001")]

PROGRAM = """
import sys
import tensorflow as tf
# Most of the time goes to compiling. The programs of other tests have their graphs optimised.
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
from scripts import train
from absl import flags
from absl.testing import flagsaver
corpus, out, shared, *names = sys.argv[1:]
for name in names:
    small = ["--epochs=1"]  # one replica: each more takes as long to compile
    if name in shared.split(","):
        small += ["--model=dnn", "--layers=1", "--width=8", "--learning_rate=0.01"]
    else:
        small += ["--scale=0.01"]
    small += ["--streams=8"] if "lstm" in name or "cldnn" in name else ["--minibatch=512"]
    if name.startswith("003-dnn"):
        small.append("--warm_start_epochs=0")  # of a single epoch, that syncs
    if name.startswith("002") or name.endswith("-asgd"):
        small += ["--simulate_replicas=2", "--chunk_minutes=0.2"]
    if name.endswith("-async"):  # its period must fit into a chunk
        small += ["--simulate_replicas=2", "--chunk_minutes=0.2", "--minibatch=8"]
    where = [f"--flagfile=scripts/recipes/{name}.flags", f"--corpus={corpus}"]
    with flagsaver.flagsaver():
        flags.FLAGS(["train", *where, f"--run_dir={out}/{name}", *small])
        train.main()
    flags.FLAGS.unparse_flags()
"""


@pytest.fixture(scope="module")
def runs(request, corpus_directory, tmp_path_factory):
    """The run directories of the recipes that are asked for."""
    asked = [i for i in request.session.items if getattr(i, "originalname", "") == _TRAINS]
    names = [item.callspec.params["name"] for item in asked]
    out = tmp_path_factory.mktemp("recipes")
    environ = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    environ |= dict.fromkeys(("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1")
    environ |= {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    (program := out / "program.py").write_text(PROGRAM)
    with warm.Popen(
        [str(program), corpus_directory, str(out), ",".join(SHARED), *names],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=800)
        finally:
            process.kill()
    assert process.returncode == 0, said
    return out


@pytest.mark.nightly_cases("000-dnn")
@pytest.mark.nightly_cases(
    "000-lstm*",
    "002-hand*",
    "002-multipass*",
    "002",
    "003-cldnn-*",
    "003-dnn-asgd*",
    "003-dnn-easgd",
)
@pytest.mark.parametrize("name", TRAINED)
def test_a_recipe_trains(runs, name):
    content = json.loads((runs / name / "history.json").read_text())
    assert content["epochs"][-1]["validation_frame_accuracy"] > 0
    rule = content["summary"]["rule"]
    if "bmuf" in name or name.startswith("000"):
        assert rule.startswith("BMUF(") and "nesterov=False" in rule
        assert "block_momentum=0.9," in rule or name.startswith("003")
    elif name.startswith("002") or name.endswith(("-asgd", "-async")):
        kinds = (
            ("ASGD(", "AveragedASGD(") if name.startswith("002") else ("Downpour(", "AsyncEASGD(")
        )
        assert rule.startswith(kinds)
        assert content["summary"]["pushes"] > 0
        averaged = name.startswith("002") and name != "002-multipass"
        assert (runs / name / "average.weights.h5").is_file() == averaged
    else:
        assert rule.startswith(("EASGD(", "BSP("))
    if name.startswith("000"):
        assert (runs / name / "ema-0.99.weights.h5").is_file()
    model = json.loads((runs / name / "model.json").read_text())
    assert model["kind"] == ("lstm" if "lstm" in name else "cldnn" if "cldnn" in name else "dnn")


def test_the_network_of_a_recipe_is_trained_by_one():
    def network(recipe):
        text = (ROOT / "scripts" / "recipes" / f"{recipe}.flags").read_text()
        return re.search("^--model=.*", text, re.MULTILINE)

    trained = {network(name)[0] for name in TRAINED if name not in SHARED and network(name)}
    trained.add(network("001")[0])  # in a test of its own
    assert {network(name)[0] for name in RECIPES if network(name)} == trained


@pytest.mark.parametrize("name", MIXED)
def test_a_recipe_has_the_lines_of_those_that_train(name):
    def lines(recipe):
        text = (ROOT / "scripts" / "recipes" / f"{recipe}.flags").read_text()
        return {line for line in text.splitlines() if line.startswith("--")}

    network, rule = map(lines, MIXED[name])
    assert lines(name) <= network | rule
    assert lines(name) - network and lines(name) - rule


@pytest.mark.nightly
def test_pretraining_gives_the_model_that_001_starts_from(run_well, corpus_directory, tmp_path):
    out = tmp_path / "rbm.weights.h5"
    pretrain = "--flagfile=scripts/recipes/001-pretrain.flags"
    small = (f"--corpus={corpus_directory}", "--scale=0.01")
    run_well("pretrain", pretrain, *small, f"--out={out}")
    flags = ("--flagfile=scripts/recipes/001.flags", f"--init={out}", f"--run_dir={tmp_path}")
    less = ("--epochs=1", "--minibatch=128", "--simulate_replicas=2")
    run_well("train", *flags, *small, *less)
    assert (tmp_path / "model.weights.h5").is_file()
    content = json.loads((tmp_path / "history.json").read_text())
    assert content["epochs"][-1]["validation_frame_accuracy"] > 0
    assert content["summary"]["rule"].startswith("BSP(")
    assert json.loads((tmp_path / "model.json").read_text())["kind"] == "dnn"
