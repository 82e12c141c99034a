"""The tables of the four papers, made again on a small corpus by `scripts.study --paper --table`.

Each row has the scores of our run, or of an average of its models, beside the paper's figures.
Error rates of another corpus cannot be the same, but the order of the rows can. Speed-ups are left
out: replicas are simulated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from scripts.study_runs import ASYNC, FIRST, MODELS, PLAIN, RBM, SERVERS, STREAMS, Run
from scripts.study_runs import DNN as OF_001

DIVERGED = math.inf


class Row(NamedTuple):
    """A row of a paper's table.

    Attributes:
        labels: the first cells of the row, one for each of `Table.heads`.
        paper: the paper's figures, one for each of `Table.columns`; lower is better.
        run: our run that corresponds to the row.
        weights: the model of the run: "global", or an average.
    """

    labels: tuple[str, ...]
    paper: tuple[float, ...]
    run: Run
    weights: str = "global"


class Table(NamedTuple):
    """A table of a paper.

    Attributes:
        title: title of the table.
        heads: heads of the rows' labels.
        columns: heads of the paper's figures.
        rows: rows of the table.
        here: differences between our runs and the paper's, in sentences.
        measure: the figure that is compared: "frame_error_rate", or "seconds" of the training.
    """

    title: str
    heads: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    here: str
    measure: str = "frame_error_rate"


# -- paper 003: DNNs under ASGD, BMUF, BSP and EASGD -----------------------------------------------

# Maps the size of a minibatch in the paper to the size here, which is a sixteenth of it.
_MINIBATCHES = {256: 16, 1024: 64, 4096: 256}
_CLASSICAL = ("--rule=bmuf", "--nonesterov", "--noblock_momentum_warmup", "--block_learning_rate=1")
_RULES = {
    "ASGD": ("--rule=downpour", *SERVERS),
    "BMUF": _CLASSICAL,
    "BSP": ("--rule=bsp",),
    "EASGD": ("--rule=easgd_async", *SERVERS),
}
_OTHER_003 = (
    "The DNN has a part of the paper's width. Rates fall exponentially, in as many epochs for all; "
    "there by Newbob. As there, all start from one epoch of a single replica, and EASGD is "
    "asynchronous. ASGD takes local steps between two pushes."
)
_OF_4096 = (
    f"{_OTHER_003} Minibatches have 64 frames in place of 4096, so that an epoch has several syncs."
)
_OF_ALL_SIZES = (
    f"{_OTHER_003} Minibatches are a sixteenth of the paper's, with rates in proportion: Kaldi's "
    "are of a sum over the minibatch."
)


def _of_003(rule: str, workers: int = 4, period: int = 5, minibatch: int = 1024) -> Run:
    size = _MINIBATCHES[minibatch]
    rate = 0.02 * size / 64
    rates = (f"--learning_rate={rate:g}", f"--final_learning_rate={rate / 10:g}")
    training = f"{rule}, period {period}" if rule else "SGD"
    name = f"003-{rule.lower()}-{workers}-{period}-{size}" if rule else f"003-sgd-{size}"
    of_rule = (*_RULES[rule], f"--sync_period={period}") if rule else ("--rule=none",)
    options = (*PLAIN, f"--minibatch={size}", "--schedule=exponential", *rates, *of_rule)
    return Run(name, "DNN", training, bool(rule), options, start=FIRST, replicas=workers)


_WERS = ("WER % test-clean", "WER % test-other")
_TABLE_1 = {
    ("ASGD", 4): (5.91, 15.55),
    ("ASGD", 8): (6.09, 16.20),
    ("BMUF", 4): (5.70, 15.01),
    ("BMUF", 8): (5.99, 15.66),
    ("BSP", 4): (6.01, 16.03),
    ("BSP", 8): (6.21, 16.55),
    ("EASGD", 4): (6.04, 16.02),
    ("EASGD", 8): (6.22, 16.64),
}
_TABLE_2 = {
    ("ASGD", 1): (5.85, 15.54),
    ("BMUF", 80): (5.74, 14.87),
    ("BSP", 5): (6.01, 16.03),
    ("EASGD", 64): (6.06, 15.97),
}
_TABLE_4 = {
    ("ASGD", 5): (5.91, 15.55),
    ("ASGD", 20): (5.97, 15.78),
    ("ASGD", 80): (DIVERGED, DIVERGED),
    ("BMUF", 5): (5.70, 15.01),
    ("BMUF", 20): (5.73, 14.86),
    ("BMUF", 80): (5.74, 14.87),
}
_TABLE_5 = {
    (256, 0): (5.80, 15.13),
    (256, 5): (5.86, 15.31),
    (256, 20): (5.86, 15.26),
    (256, 80): (5.87, 15.13),
    (1024, 0): (5.72, 14.80),
    (1024, 5): (5.71, 15.02),
    (1024, 20): (5.74, 15.02),
    (1024, 80): (5.69, 14.90),
    (4096, 0): (5.83, 15.44),
    (4096, 5): (5.70, 15.01),
    (4096, 20): (5.73, 14.86),
    (4096, 80): (5.74, 14.87),
}
_SINGLE = (5.83, 15.44)


def _by_size(minibatch: int, period: int, paper: tuple[float, float]) -> Row:
    rule = "BMUF" if period else ""
    shown = str(period) if period else "one replica"
    return Row((str(minibatch), shown), paper, _of_003(rule, 4, period, minibatch))


# -- paper 000: BMUF, and MA and EMA of its model --------------------------------------------------

_AVERAGES = ("--ema_decay=0.8", "--ma")
_OF_000 = {
    "LSTM": (
        "--model=lstm-000",
        *("--learning_rate=0.2", "--final_learning_rate=0.01", "--sync_period=10"),
        *STREAMS,
    ),
    "DNN": (
        "--model=dnn-000",
        *("--minibatch=64", "--sync_period=20"),
        *("--learning_rate=0.02", "--final_learning_rate=0.001", "--schedule=exponential"),
    ),
}
_CERS_OF_000 = {"LSTM": (4.37, 4.26, 4.20), "DNN": (7.52, 7.14, 6.89)}


def _of_000(model: str) -> list[Row]:
    training = "SGD, classical BMUF"
    options = (*_OF_000[model], *_CLASSICAL, *_AVERAGES)
    run = Run(f"000-{model.lower()}", model, training, True, options)
    methods = ("BMUF", "BMUF + MA", "BMUF + EMA")
    figures = zip(methods, _CERS_OF_000[model], ("global", "ma", "ema-0.8"), strict=True)
    return [Row((model, method), (paper,), run, weights) for method, paper, weights in figures]


# -- paper 001: model averaging, NG-SGD and RBMs ---------------------------------------------------

_OF_SUITE = {run.name: run for run in (*MODELS, *ASYNC)}
_SWB = ("WER % SWB", "WER % CallHome")
_OTHER_001 = (
    "The six layers of sigmoids have a part of the paper's width, minibatches 128 frames, and "
    "there are 4 replicas, unless --replicas says otherwise: 16 and 32 would have too few syncs."
)


def _of_001(optimizer: str, start: str, parallel: bool) -> Run:
    return _OF_SUITE[f"dnn-{optimizer}-{start}-{'n' if parallel else '1'}"]


def _one_and_many(
    label: str,
    optimizer: str,
    start: str,
    nodes: str,
    alone: tuple[float, ...],
    many: tuple[float, ...],
) -> list[Row]:
    """Returns rows of one replica and of several, which stand for the paper's nodes."""
    return [
        Row((label, "1"), alone, _of_001(optimizer, start, False)),
        Row((label, nodes), many, _of_001(optimizer, start, True)),
    ]


def _every(period: int) -> Run:
    if period == 10:
        return _of_001("ngsgd", "rbm", True)
    options = (*OF_001, "--optimizer=ngsgd", f"--sync_period={period}")
    training = f"NG-SGD, model averaging every {period}, RBM start"
    return Run(f"001-every-{period}", "DNN", training, True, options, start=RBM)


# -- paper 002: averaged ASGD in one pass ----------------------------------------------------------

# Maps the length of a chunk in the paper, in hours, to the length here, in minutes.
_CHUNKS = {1: 0.25, 5: 0.5, 10: 1.0, 20: 2.5, 25: 5.0}
_TABLE_1_OF_002 = {
    1: (8.93, 22.15),
    5: (9.12, 22.87),
    10: (9.36, 23.40),
    20: (9.51, 23.91),
    25: (9.62, 24.11),
}
_CERS = ("CER % clean7k", "CER % noise360")
_OTHER_002 = (
    "The network is the DNN of paper 003 at a part of its width, after one epoch of a single "
    "replica, where the paper has RBMs; and there are minutes of speech in place of hundreds of "
    "hours."
)
_TWO_WAYS = (
    f"{_OTHER_002} Averaged ASGD has chunks of 5 minutes, of an hour there, and searches rates on "
    "20 % of them, 3 % there. ASGD has minibatches of 64 throughout; there they grow to 1024."
)


def _of_chunk(minutes: float) -> Run:
    searched = _OF_SUITE["aasgd-search"]
    if minutes == 5:  # the suite `async` has this run already
        return searched
    options = (*searched.options, f"--chunk_minutes={minutes:g}")
    training = f"averaged ASGD, one pass, chunks of {minutes:g} min"
    return searched._replace(name=f"002-chunk-{minutes:g}", training=training, options=options)


TABLES: Mapping[tuple[str, int], Table] = {
    ("000", 2): Table(
        "final models of an LSTM and a DNN under BMUF, and their averages, 8 GPUs",
        ("model", "method"),
        ("CER %",),
        (*_of_000("LSTM"), *_of_000("DNN")),
        "The models have a part of the paper's width. There are 4 replicas, unless --replicas says "
        "otherwise, with a block momentum of 1 - 1/N (0.9 there, of 8), and more epochs; the local "
        "momentum is fitted to the shorter blocks, and the EMA is EMA(0.8), since there are far "
        "fewer syncs.",
    ),
    ("001", 2): Table(
        "RBM pretraining and random initialization, 1 and 32 GPUs",
        ("start", "nodes there"),
        _SWB,
        (
            *_one_and_many("random", "ngsgd", "random", "32", (15.6, 27.4), (16.4, 28.8)),
            *_one_and_many("RBM", "ngsgd", "rbm", "32", (14.7, 26.8), (15.2, 27.1)),
        ),
        _OTHER_001,
    ),
    ("001", 3): Table(
        "averaging frequencies, 16 GPUs",
        ("minibatches between averages",),
        _SWB,
        (
            Row(("one replica",), (14.7, 26.8), _of_001("ngsgd", "rbm", False)),
            Row(("10",), (15.1, 27.0), _every(10)),
            Row(("20",), (15.8, 28.0), _every(20)),
        ),
        _OTHER_001,
    ),
    ("001", 6): Table(
        "NG-SGD and SGD, 1 and 16 GPUs",
        ("optimizer", "nodes there"),
        _SWB,
        (
            *_one_and_many("SGD", "sgd", "rbm", "16", (14.9, 26.9), (16.3, 28.3)),
            *_one_and_many("NG-SGD", "ngsgd", "rbm", "16", (14.7, 26.8), (15.1, 27.0)),
        ),
        _OTHER_001,
    ),
    ("002", 1): Table(
        "averaged ASGD with searched rates, by the size of a chunk",
        ("chunk there, hours", "chunk here, minutes"),
        _CERS,
        tuple(
            Row((str(hours), f"{minutes:g}"), _TABLE_1_OF_002[hours], _of_chunk(minutes), "average")
            for hours, minutes in _CHUNKS.items()
        ),
        f"{_OTHER_002} Rates are searched on 20 % of a chunk, 3 % there; so on less speech than in "
        "the paper's smallest chunk.",
    ),
    ("002", 2): Table(
        "asynchronous SGD in several passes and averaged in one, 4 GPUs",
        ("training",),
        _CERS,
        (
            Row(("ASGD, several passes",), (7.63, 19.17), _OF_SUITE["asgd-passes"]),
            Row(("averaged, one pass",), (7.89, 20.01), _OF_SUITE["aasgd-search"], "average"),
        ),
        _TWO_WAYS,
    ),
    ("002", 3): Table(
        "training times, 4 GPUs",
        ("training",),
        ("hours",),
        (
            Row(("ASGD, several passes",), (91.2,), _OF_SUITE["asgd-passes"]),
            Row(("averaged, one pass",), (14.3,), _OF_SUITE["aasgd-search"], "average"),
        ),
        f"{_TWO_WAYS} The times are of simulated workers in one process.",
        "seconds",
    ),
    ("003", 1): Table(
        "DNNs by rule and number of GPUs, period 5",
        ("rule", "workers"),
        _WERS,
        (
            *(
                Row((rule, str(n)), paper, _of_003(rule, n))
                for (rule, n), paper in _TABLE_1.items()
            ),
            Row(("SGD", "1"), _SINGLE, _of_003("")),
        ),
        _OF_4096,
    ),
    ("003", 2): Table(
        "DNNs by rule, with each rule's own period, 4 GPUs",
        ("rule", "period"),
        _WERS,
        tuple(
            Row((rule, str(period)), paper, _of_003(rule, 4, period))
            for (rule, period), paper in _TABLE_2.items()
        ),
        _OF_4096,
    ),
    ("003", 4): Table(
        "DNNs under ASGD and BMUF by period, 4 GPUs",
        ("rule", "period"),
        _WERS,
        (
            *(
                Row((rule, str(period)), paper, _of_003(rule, 4, period))
                for (rule, period), paper in _TABLE_4.items()
            ),
            Row(("SGD", "one replica"), _SINGLE, _of_003("")),
        ),
        _OF_4096,
    ),
    ("003", 5): Table(
        "DNNs under BMUF by minibatch and period, 4 GPUs",
        ("minibatch there", "period"),
        _WERS,
        tuple(_by_size(size, period, paper) for (size, period), paper in _TABLE_5.items()),
        _OF_ALL_SIZES,
    ),
}


def numbers(paper: str, wanted: Sequence[str]) -> list[int]:
    """Returns the numbers of the requested tables of a paper; of all its tables if none is named.

    Raises:
        ValueError: one of the requested tables is not made here.
    """
    known = [str(number) for of, number in TABLES if of == paper]
    for text in wanted:
        if text not in known:
            raise ValueError(
                f"--table={','.join(wanted)}: table {text!r} of paper {paper} is not made here. "
                f"There are: {', '.join(known)}."
            )
    return [int(text) for text in dict.fromkeys(wanted or known)]


def runs(paper: str, tables: Sequence[int]) -> list[Run]:
    """Returns the runs of tables of a paper, each once, with all models that rows need."""
    found: dict[str, Run] = {}
    for number in tables:
        for row in TABLES[paper, number].rows:
            run = found.get(row.run.name, row.run._replace(models=()))
            if row.weights not in run.models:
                run = run._replace(models=(*run.models, row.weights))
            found[run.name] = run
    return list(found.values())


def page(paper: str, tables: Sequence[int], results: Sequence[Mapping[str, Any]]) -> str:
    """Returns tables of a paper, in Markdown, with our figures beside the paper's.

    Args:
        paper: name of the paper, such as "003".
        tables: numbers of the paper's tables.
        results: for each model of each run its `name`, `weights` and figures, which are None if the
            run diverged. Rows without a result are left out, and so are tables without a row.
    """
    ours = {(found["name"], found["weights"]): found for found in results}
    parts = ["*there*: in the paper; *here*: what these runs gave."]
    for number in tables:
        table = TABLES[paper, number]
        rows = [row for row in table.rows if (row.run.name, row.weights) in ours]
        if not rows:
            continue
        found = [ours[row.run.name, row.weights] for row in rows]
        parts += [
            f"## Paper {paper}, table {number}: {table.title}",
            _table(table, rows, found),
            _agreement(table, rows, found),
            f"What differs here: {table.here}",
        ]
    return "\n\n".join(parts) + "\n"


def _table(table: Table, rows: list[Row], found: list[Mapping[str, Any]]) -> str:
    ours = ("frame error % here", "phone error % here", "minutes here", "order here")
    heads = (*table.heads, *table.columns, "order there", *ours)
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    there = _places([sum(row.paper) for row in rows])
    here = _places([_measured(table, each) for each in found])
    for row, each, place, own in zip(rows, found, there, here, strict=True):
        rates = (each["frame_error_rate"], each["phone_error_rate"])
        cells = (
            *row.labels,
            *map(_shown, row.paper),
            str(place),
            *(_shown(math.inf if rate is None else rate) for rate in rates),
            f"{each['seconds'] / 60:.1f}",
            str(own),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _agreement(table: Table, rows: list[Row], found: list[Mapping[str, Any]]) -> str:
    """Returns a sentence on the pairs of rows that have the paper's order, and on the others."""
    ours = {row: _measured(table, each) for row, each in zip(rows, found, strict=True)}
    pairs = list(_ordered(rows))
    if not pairs:
        return "No two of these rows have an order in the paper."
    others = [(a, b) for a, b in pairs if not ours[a] < ours[b]]
    alike = f"{len(pairs) - len(others)} of {len(pairs)}"
    lines = [
        "Pairs of rows that all columns of the paper put in the same order, and that are in that "
        f"order here: {alike}.{' Not so:' if others else ''}"
    ]
    for better, worse in others:
        names = [" ".join(row.labels) for row in (better, worse)]
        there = [", ".join(map(_shown, row.paper)) for row in (better, worse)]
        here = [_shown(ours[row]) for row in (better, worse)]
        lines.append(
            f"- {names[0]} before {names[1]}: {there[0]} to {there[1]} there, {here[0]} to "
            f"{here[1]} here"
        )
    return "\n".join(lines)


def _ordered(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Yields the pairs of rows whose first one is better in all columns."""
    for pair in itertools.permutations(rows, 2):
        if all(first < second for first, second in zip(pair[0].paper, pair[1].paper, strict=True)):
            yield pair


def _measured(table: Table, found: Mapping[str, Any]) -> float:
    diverged = found["frame_error_rate"] is None
    return math.inf if diverged else float(found[table.measure])


def _places(figures: Sequence[float]) -> list[int]:
    """Returns the rank of each figure, from 1; equal figures share it."""
    return [1 + sum(other < figure for other in figures) for figure in figures]


def _shown(figure: float) -> str:
    return "diverged" if math.isinf(figure) else f"{figure:.2f}"
