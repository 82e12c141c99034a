"""RBM pretraining on a tiny corpus, and a training that starts from it."""

import json

import pytest

from input import index
from models.dnn import dnn
from scripts import runs

SHAPE = ("--layers=2", "--width=24", "--context=1")


@pytest.fixture(scope="module")
def weights(run_well, corpus_directory, tmp_path_factory):
    out = tmp_path_factory.mktemp("rbm") / "start.weights.h5"
    flags = ("--minibatch=64", "--epochs=3", "--momentum_minibatches=50")
    rates = ("--gaussian_learning_rate=0.05",)
    ended = run_well(
        "pretrain", f"--corpus={corpus_directory}", f"--out={out}", *SHAPE, *flags, *rates
    )
    return out, ended


@pytest.mark.nightly
def test_every_layer_learns_and_shows_it(weights):
    out, ended = weights
    report = json.loads((out.parent / "start.json").read_text())
    assert [layer["visible"] for layer in report["layers"]] == ["gaussian", "bernoulli"]
    for layer in report["layers"]:
        assert layer["errors"][-1] < layer["errors"][0]
    assert len(report["layers"][0]["errors"]) == 6
    assert "--epochs=3" in report["flags"]
    assert "hidden2, layer 2 of 2, bernoulli visible units: epoch 3 of 3" in ended.out
    last = json.loads(ended.out.splitlines()[-1])
    assert last["weights"] == str(out)
    assert set(last["reconstruction_error"]) == {"hidden1", "hidden2"}


@pytest.mark.nightly
def test_training_starts_from_it(weights, run_well, corpus_directory, tmp_path):
    """With a learning rate of next to 0 the run ends with the weights that it began with."""
    out, _ = weights
    flags = ("--rule=none", "--activation=sigmoid", "--epochs=1", "--learning_rate=1e-30")
    run_well(
        "train",
        f"--corpus={corpus_directory}",
        f"--run_dir={tmp_path}",
        f"--init={out}",
        *SHAPE,
        *flags,
    )
    corpus = index.read(corpus_directory)
    models = []
    for path in (out, tmp_path / "model.weights.h5"):
        model = dnn(3 * corpus.feature_dim, corpus.num_classes, layers=2, width=24, seed=9)
        model.load_weights(path)
        models.append(model.get_weights())
    for started, ended in zip(*models, strict=True):
        assert abs(started - ended).max() < 1e-20


def test_a_net_of_other_units_does_not_start_from_it(weights, tmp_path):
    out, _ = weights
    runs.check_activation({"arguments": {"activation": "sigmoid"}}, out)
    with pytest.raises(ValueError, match="has the weights of sigmoid units, says start.json besi"):
        runs.check_activation({"arguments": {"activation": "relu"}}, out)
    (tmp_path / "model.json").write_text('{"arguments": {"activation": "tanh"}}')
    with pytest.raises(ValueError, match="has the weights of tanh units, says model.json beside"):
        runs.check_activation({"arguments": {"activation": "relu"}}, tmp_path / "ma.weights.h5")
    (tmp_path / "model.json").unlink()
    for content in ("", "[]", "{}"):  # files of others
        (tmp_path / "a.json").write_text(content)
        runs.check_activation({"arguments": {"activation": "relu"}}, tmp_path / "a.weights.h5")
    runs.check_activation({"arguments": {"activation": "relu"}}, tmp_path / "b.weights.h5")


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--out=model.h5", "must end in .weights.h5"),
        ("--momentum=0.2", "momentum must be 0 or lie in [0.5, 1). Received: 0.2"),
        ("--learning_rate=0", "learning_rate must be positive"),
        ("--activation=relu", "Give --activation=sigmoid, here and to train"),
    ],
)
def test_bad_flags_give_one_line(run, corpus_directory, tmp_path, flag, words):
    ended = run(
        "pretrain", f"--corpus={corpus_directory}", f"--out={tmp_path}/a.weights.h5", *SHAPE, flag
    )
    assert ended.returncode == 1
    (line,) = [line for line in ended.err.splitlines() if line.startswith("pretrain: ")]
    assert words in line
    assert not list(tmp_path.glob("*.h5"))
