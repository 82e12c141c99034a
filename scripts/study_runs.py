"""The runs of the suites `models` and `async` of `scripts.study`, and the table of their scores.

`scripts/study_papers.py` takes some of these runs for the papers' tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

RBM = "rbm"  # name of the run that pretrains the DNNs
FIRST = "first-epoch"  # name of a run of one replica; other runs start from its weights


class Run(NamedTuple):
    """A training run.

    Attributes:
        name: name of the run.
        model: kind of the model, in the table.
        training: description of the training, in the table.
        parallel: whether it has several replicas.
        options: flags of scripts.train.
        models: names of its models, which are its rows in the table.
        start: the run from whose weights it starts; "" for random weights.
        replicas: number of replicas of a parallel run; 0: --replicas.
    """

    name: str
    model: str
    training: str
    parallel: bool
    options: tuple[str, ...]
    models: tuple[str, ...] = ("global",)
    start: str = ""
    replicas: int = 0


DNN = ("--flagfile=scripts/recipes/001.flags", "--minibatch=128")
# The recipes of the recurrent models are made for thousands of hours of speech. These flags fit a
# small corpus.
STREAMS = (
    "--streams=8",
    "--truncation=20",
    "--clip_norm=5",
    "--schedule=exponential",
)
LSTM = ("--model=lstm-000", "--learning_rate=0.2", "--final_learning_rate=0.01", *STREAMS)
CLDNN = (
    "--model=cldnn-003",
    "--coefficients=80",
    "--learning_rate=0.04",
    "--final_learning_rate=0.002",
    *STREAMS,
)
# With the decay 0.8, the EMA spans about five syncs. An epoch has about ten syncs, so the EMA spans
# half an epoch.
BMUF = ("--rule=bmuf", "--ema_decay=0.8", "--ma")
AVERAGED = ("global", "ma", "ema-0.8")


def _of_dnn(optimizer: str, pretrained: bool, parallel: bool) -> Run:
    start = "RBM" if pretrained else "random"
    title = {"sgd": "SGD", "ngsgd": "NG-SGD"}[optimizer]
    name = f"dnn-{optimizer}-{start.lower()}-{'n' if parallel else '1'}"
    averaging = ", model averaging" if parallel else ""
    training = f"{title}{averaging}, {start} start"
    options = (*DNN, f"--optimizer={optimizer}")
    return Run(name, "DNN", training, parallel, options, start=RBM if pretrained else "")


MODELS = (
    *(
        _of_dnn(optimizer, pretrained, parallel)
        for optimizer, pretrained in (("sgd", True), ("ngsgd", True), ("ngsgd", False))
        for parallel in (False, True)
    ),
    Run("lstm-1", "LSTM", "SGD", False, (*LSTM, "--rule=none")),
    Run(
        "lstm-n",
        "LSTM",
        "SGD, Nesterov BMUF",
        True,
        (*LSTM, *BMUF, "--sync_period=10"),
        AVERAGED,
    ),
    Run("cldnn-1", "CLDNN", "SGD", False, (*CLDNN, "--rule=none")),
    Run(
        "cldnn-n",
        "CLDNN",
        "SGD, Nesterov BMUF",
        True,
        (*CLDNN, *BMUF, "--sync_period=20"),
        AVERAGED,
    ),
)


# Small minibatches give several syncs in an epoch even with a period of 80.
PLAIN = ("--model=dnn-003", "--minibatch=64", "--learning_rate=0.02", "--momentum=0")
FALLING = ("--schedule=exponential", "--final_learning_rate=0.002")
SERVERS = ("--chunk_minutes=1",)
_QUARTER = ("--rule=downpour", "--block_learning_rate=0.25", *SERVERS)


def _by_period(name: str, training: str, period: int, *options: str) -> Run:
    options = (*PLAIN, *FALLING, f"--sync_period={period}", *options)
    return Run(
        f"{name}-{period}", "DNN", f"{training}, period {period}", True, options, start=FIRST
    )


def _one_pass(name: str, training: str, *options: str) -> Run:
    options = (*PLAIN, "--rule=aasgd", "--sync_period=1", "--epochs=1", *SERVERS, *options)
    return Run(name, "DNN", training, True, options, ("global", "average"), start=FIRST)


ASYNC = (
    *(_by_period("asgd", "ASGD", period, "--rule=asgd", *SERVERS) for period in (1, 5, 20, 80)),
    *(
        _by_period("downpour", "Downpour", period, "--rule=downpour", *SERVERS)
        for period in (1, 5, 20, 80)
    ),
    *(
        _by_period("downpour-quarter", "Downpour, ζ = 1/4", period, *_QUARTER)
        for period in (5, 20, 80)
    ),
    *(_by_period("bmuf", "Nesterov BMUF", period, "--rule=bmuf") for period in (5, 20, 80)),
    _by_period("easgd", "asynchronous EASGD", 20, "--rule=easgd_async", *SERVERS),
    Run(
        "asgd-passes",
        "DNN",
        "ASGD, several passes, Newbob",
        True,
        (
            *PLAIN,
            "--rule=asgd",
            "--sync_period=1",
            "--schedule=newbob",
            "--newbob_by=accuracy",
            "--epochs=20",
            *SERVERS,
        ),
        start=FIRST,
    ),
    # Chunks are long in this run, because 20 % of a chunk must suffice to see if a learning rate is
    # too high.
    _one_pass(
        "aasgd-search",
        "averaged ASGD, one pass, rates searched",
        "--search_rate",
        "--search_part=0.2",
        "--chunk_minutes=5",
    ),
    _one_pass("aasgd-hand", "averaged ASGD, one pass, rates by hand", "--schedule=hand"),
)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table of runs, in Markdown. Error rates are None if a run has diverged."""
    names = {"global": "global", "ma": "MA"}
    lines = [
        "| model | training | replicas | epochs | weights | test frame error % | "
        "test phone error % | minutes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        weights = names.get(row["weights"], row["weights"].replace("ema-", "EMA "))
        rates = [row["frame_error_rate"], row["phone_error_rate"]]
        shown = ["diverged" if rate is None else f"{rate:.2f}" for rate in rates]
        epochs = "" if row["epochs"] is None else row["epochs"]
        lines.append(
            f"| {row['model']} | {row['training']} | {row['replicas']} | {epochs} | {weights} | "
            f"{shown[0]} | {shown[1]} | {row['seconds'] / 60:.1f} |"
        )
    return "\n".join(lines) + "\n"
