"""The end of a run of replicas, in NumPy, written from the pages of docs/ alone.

All numbers are float64, and no code of tfpara is used. `expected` trains the replicas of a case one
after the other and applies the equations of docs/rules.md and docs/syncs.md between their blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

SHAPES = ((6, 7), (7,), (7, 5), (5,))  # the network: 6 inputs, 7 tanh units, 5 classes
SIZES = [int(np.prod(shape)) for shape in SHAPES]
ENDS = np.cumsum([0, *SIZES])
# The runs of variables that are fragments, as indexes of the first and past the last one.
FRAGMENTS = {1: [(0, 4)], 2: [(0, 1), (1, 4)], 4: [(0, 1), (1, 2), (2, 3), (3, 4)]}
EPSILON = 1e-7
NEVER = 1e9


@dataclasses.dataclass(frozen=True)
class Fit:
    """One call of `fit`: the rows of minibatch [replica][step], 0 for none."""

    sizes: tuple[tuple[int, ...], ...]
    epochs: int
    sync_period: int
    known: bool  # whether the number of minibatches is known when the epoch begins
    new_weights: bool = False  # whether the weights are set anew before it
    arrays: bool = False  # whether the rows are given as arrays, of which a batch is a step of all

    @property
    def steps(self) -> int:
        return max(map(len, self.sizes))


@dataclasses.dataclass(frozen=True)
class Case:
    """One run; all values are plain, so that a case prints as what it is."""

    number: int
    workers: int
    devices: int  # of each worker
    rule: str
    rule_options: Mapping[str, float | str | bool | None]
    optimizer: str
    optimizer_options: Mapping[str, float | bool | int]
    fits: tuple[Fit, ...]
    local_state: str = "auto"
    overlap: int = 0  # steps from a sync to the merge of its result; 0: training stops
    fragments: int = 1
    compression: str = "none"
    device_sync_period: int | None = None
    aggregation: str = "auto"
    averages: Mapping[str, Mapping[str, float | bool]] = dataclasses.field(default_factory=dict)
    weighted: str = "no"  # sample weights: "no", "rows" (divided by rows), "sum" (by their sum)
    decay: float = 0.0  # of the L2 regularizer of the first kernel
    frozen: bool = False  # the second layer
    constraint: str = ""  # of the first kernel: "nonneg", "clip" to ±0.3 or "unit" norm
    steps_per_execution: int = 1
    jit_compile: bool = False
    resumed: bool = False  # after the first epoch, as by a new process of the script
    resumed_on: int = 0  # devices of the second fit, which goes on from the first one's checkpoint

    @property
    def replicas(self) -> int:
        return self.workers * self.devices


def minibatch(case: Case, fit: int, replica: int, step: int) -> tuple[np.ndarray, ...]:
    """Returns inputs, labels and sample weights, the same on every call."""
    rng = np.random.default_rng([case.number, fit, replica, step])
    rows = case.fits[fit].sizes[replica][step]
    x, y = rng.normal(size=(rows, 6)), rng.integers(0, 5, rows)
    weights = rng.uniform(0.2, 2, rows) if case.weighted != "no" else np.ones(rows)
    return x.astype("float32"), y.astype("int32"), weights.astype("float32")


def new_weights(case: Case) -> np.ndarray:
    """Returns the flat weights that are set before a `fit` with `new_weights`."""
    return np.random.default_rng([case.number, 99]).normal(size=ENDS[-1], scale=0.3)


def unflat(vector: np.ndarray) -> list[np.ndarray]:
    return [vector[a:b].reshape(s) for a, b, s in zip(ENDS, ENDS[1:], SHAPES, strict=False)]


def flat(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.ravel(array) for array in arrays])


def constrained(case: Case, vector: np.ndarray) -> np.ndarray:
    """Returns flat weights of which the first kernel is within its constraint."""
    kernel, *others = unflat(vector)
    if case.constraint == "nonneg":
        kernel = np.maximum(kernel, 0)
    elif case.constraint == "clip":
        kernel = np.clip(kernel, -0.3, 0.3)
    elif case.constraint == "unit":
        kernel = kernel / (EPSILON + np.sqrt((kernel**2).sum(0, keepdims=True)))
    return flat([kernel, *others])


# ---------------------------------------------------------------------------- a replica's own step


def loss_and_gradient(case: Case, vector: np.ndarray, batch: tuple) -> tuple[float, np.ndarray]:
    """The cross-entropy of the network, divided by rows or by weights, and its gradient."""
    x, y, weights = batch
    w1, b1, w2, b2 = unflat(vector)
    hidden = np.tanh(x @ w1 + b1)
    logits = hidden @ w2 + b2
    logits = logits - logits.max(1, keepdims=True)
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    rows = np.arange(len(y))
    shares = weights / divisor(case, batch)
    loss = -(shares * np.log(p[rows, y])).sum() + case.decay * (w1**2).sum()
    p[rows, y] -= 1
    p *= shares[:, None]
    back = (p @ w2.T) * (1 - hidden**2)
    return loss, flat([x.T @ back + 2 * case.decay * w1, back.sum(0), hidden.T @ p, p.sum(0)])


def divisor(case: Case, batch: tuple) -> float:
    """The divisor of a minibatch's loss, which is how much a replica counts for it."""
    return float(batch[2].sum()) if case.weighted == "sum" else float(len(batch[1]))


def fitted(case: Case, fit: Fit, worker_steps: int) -> tuple[float, float]:
    """Returns the momentum (or β₁) and the factor of the rate within a block (docs/rules.md)."""
    options = case.optimizer_options
    own = options.get("beta_1", 0.9) if case.optimizer in ADAMS else options.get("momentum", 0.0)
    if (
        case.local_state != "auto"
        or not has_momentum(case)
        or case.optimizer in ("rmsprop", "adagrad")
    ):
        return own, 1.0
    block = fit.sync_period * case.fragments
    if fit.known:
        block = min(block, worker_steps)
    block /= options.get("gradient_accumulation_steps", 1)
    momentum = min(own, max(0.0, 1 - 5 / block))
    c = min(1.0, max(0.5, block / 20))
    factor = max(1.0, c * (1 - momentum) / (1 - own))
    return momentum, (1.0 if case.optimizer in ADAMS else factor)


ADAMS = ("adam", "adamw")


class Optimizer:
    """Keras' optimizers of one replica, from their own pages' equations."""

    def __init__(self, case: Case) -> None:
        self.case, self.options = case, dict(case.optimizer_options)
        self.accumulated, self.calls = np.zeros(ENDS[-1]), 0
        self.reset()

    def reset(self) -> None:
        initial = 0.1 if self.case.optimizer == "adagrad" else 0.0
        self.slots = [np.zeros(ENDS[-1]), np.full(ENDS[-1], initial)]
        if self.case.optimizer in ADAMS:
            self.count = 0

    count = 0

    def step(self, w: np.ndarray, gradient: np.ndarray, momentum: float, factor: float):
        every = self.options.get("gradient_accumulation_steps", 1)
        self.calls += 1
        self.accumulated += gradient
        if self.calls % every:
            return w
        g = self.clipped(self.accumulated / every)
        self.accumulated = np.zeros_like(g)
        self.count += 1
        rate = self.options["learning_rate"]
        trained = np.ones_like(w, bool)
        if self.case.frozen:
            trained[ENDS[2] :] = False
        new = self.stepped(w, g, rate, momentum, factor, trained)
        return np.where(trained, new, w)

    def clipped(self, g: np.ndarray) -> np.ndarray:
        if "clipnorm" in self.options:  # each variable by itself
            limit = self.options["clipnorm"]
            parts = [g[a:b] for a, b in zip(ENDS, ENDS[1:], strict=False)]
            return np.concatenate(
                [p * min(1, limit / max(np.linalg.norm(p), 1e-30)) for p in parts]
            )
        if "global_clipnorm" in self.options:
            trained = g[: ENDS[2]] if self.case.frozen else g
            return g * min(1, self.options["global_clipnorm"] / np.linalg.norm(trained))
        return g

    def stepped(self, w, g, rate, momentum, factor, trained):
        first, second = self.slots
        kind = self.case.optimizer
        w = w * (1 - self.options.get("weight_decay", 0.0) * rate)
        if kind == "sgd":
            rate *= factor
            first[:] = np.where(trained, momentum * first - rate * g, first)
            return w + (momentum * first - rate * g if self.options.get("nesterov") else first)
        if kind in ADAMS:
            t, beta_2 = self.count, 0.999
            first += (g - first) * (1 - momentum)
            second += (g * g - second) * (1 - beta_2)
            step = rate * np.sqrt(1 - beta_2**t) / (1 - momentum**t)
            return w - step * first / (np.sqrt(second) + EPSILON)
        if kind == "rmsprop":
            second[:] = 0.9 * second + 0.1 * g * g
            return w - rate * g / np.sqrt(second + EPSILON)
        second += g * g  # Adagrad
        return w - rate * g / np.sqrt(second + EPSILON)


# ------------------------------------------------------------------------------------------- rules


def has_momentum(case: Case) -> bool:
    """Returns whether the rule has a momentum of its own."""
    options = case.rule_options
    if case.rule == "bmuf":
        return block_momentum(case)(NEVER) > 0
    return case.rule in ("diloco", "slowmo") or (
        case.rule == "outer_sgd" and options["momentum"] > 0
    )


def block_momentum(case: Case):
    """Returns η as a function of the blocks so far."""
    n, options = case.replicas, case.rule_options
    eta, warmup = options.get("block_momentum"), options.get("warmup")
    normalises = case.optimizer != "sgd"
    if eta is None and warmup is not False and case.optimizer in ADAMS:
        eta = None if case.local_state == "auto" else "sqrt"  # the local average is not shortened
    given = eta is not None and eta != "sqrt"
    slow = 20.0 if eta == "sqrt" else 5.0 if normalises else 1.0
    if given or warmup not in (None, True):  # of an η that is given: no warm-up unless asked for
        slow = 1.0 if warmup is True else float(warmup or 0)
    if not given:
        eta = 1 - 1 / (np.sqrt(n) if eta == "sqrt" else n)
        eta = min(eta, 0.9) if slow else eta

    def eta_after(blocks: float) -> float:
        return min(eta, 1 - slow / (blocks + slow)) if slow else eta

    return eta_after


class Centre:
    """The rule's state for one fragment: the global model W, what replicas get, the momentum."""

    def __init__(self, case: Case, start: np.ndarray) -> None:
        self.case, self.n = case, case.replicas
        self.eta = block_momentum(case) if case.rule == "bmuf" else None
        self.blocks = 0.0
        self.delta, self.square = np.zeros_like(start), np.zeros_like(start)
        self.outer_count = 0.0
        self.averages = {name: Average(options, start) for name, options in case.averages.items()}
        self.set(start)

    def set(self, weights: np.ndarray) -> None:
        """Weights that a user sets: the global model, without momentum; averages start again."""
        self.w, self.point = weights.copy(), weights.copy()
        self.delta = np.zeros_like(weights)
        for average in self.averages.values():
            average.start(weights)

    def sync(self, local: np.ndarray, mean: np.ndarray, f: float) -> np.ndarray:
        """Returns what each replica goes on from, after a share f of a whole block."""
        new = getattr(self, self.case.rule)(local, mean, f, **self.case.rule_options)
        self.blocks += f
        if self.case.rule == "bmuf" and self.case.rule_options.get("nesterov", True):
            self.point = self.w + self.eta(self.blocks) * self.delta
        else:
            self.point = self.w.copy()
        for average in self.averages.values():
            average.update(self.w, f)
        return new if new is not None else np.array([self.point] * self.n)

    def bsp(self, local, mean, f):
        self.w = mean

    def bmuf(self, local, mean, f, block_learning_rate=1.0, nesterov=True, **_):
        eta, zeta = self.eta(self.blocks), block_learning_rate
        update = mean - (self.point if nesterov else self.w)
        self.w = self.w + f * eta * self.delta + zeta * update
        self.delta = (1 - f * (1 - eta)) * self.delta + zeta * update

    def easgd(self, local, mean, f, elasticity=None):
        alpha = 0.9 / self.n if elasticity is None else elasticity
        new = local - alpha * (local - self.w)
        self.w = self.w + alpha * self.n * (mean - self.w)
        return new

    def outer_sgd(self, local, mean, f, learning_rate, momentum, nesterov):
        g = (self.w - mean) / f
        moved = momentum * self.delta - learning_rate * g
        step = momentum * moved - learning_rate * g if nesterov else moved
        self.w = self.w + f * step
        self.delta = self.delta + f * (moved - self.delta)

    def diloco(self, local, mean, f, learning_rate=0.7, momentum=0.9):
        self.outer_sgd(local, mean, f, learning_rate, momentum, True)

    def slowmo(self, local, mean, f, slow_learning_rate=1.0, slow_momentum=0.7):
        self.outer_sgd(local, mean, f, slow_learning_rate, slow_momentum, False)

    def outer_adam(self, local, mean, f, learning_rate, epsilon):
        """Whole blocks only: the drawing of cases sees to that."""
        assert f == 1
        g = self.w - mean
        self.outer_count += 1
        self.delta += (g - self.delta) * 0.1
        self.square += (g * g - self.square) * 0.001
        rate = learning_rate * np.sqrt(1 - 0.999**self.outer_count) / (1 - 0.9**self.outer_count)
        self.w = self.w - rate * self.delta / (np.sqrt(self.square) + epsilon)


class Average:
    """An average of W: a mean, or an exponential one as TensorFlow's."""

    def __init__(self, options: Mapping[str, float | bool], start: np.ndarray) -> None:
        self.options = options
        self.start(start)

    def start(self, weights: np.ndarray) -> None:
        self.count, self.product = 0.0, 1.0
        debias = self.options.get("zero_debias") or "decay" not in self.options
        self.sum = np.zeros_like(weights) if debias else weights.copy()
        self.initial = weights.copy()

    def update(self, w: np.ndarray, f: float) -> None:
        if "decay" not in self.options:
            self.count += f
            self.sum = self.sum + f * (w - self.sum) / self.count
            return
        beta = self.options["decay"]
        if self.options["num_updates"]:  # count: the syncs before this one
            beta = min(beta, (1 + self.count) / (10 + self.count))
        self.count += f
        step = f * (1 - beta)
        self.sum = self.sum + step * (w - self.sum)
        self.product *= 1 - step

    @property
    def value(self) -> np.ndarray:
        if not self.count:
            return self.initial
        return self.sum / (1 - self.product) if self.options.get("zero_debias") else self.sum


# --------------------------------------------------------------------------------------- the syncs


class Wire:
    """The rounded exchange of one fragment between workers (docs/syncs.md, "compression")."""

    def __init__(self, case: Case, centre: Centre, rounded) -> None:
        self.case, self.centre, self.rounded = case, centre, rounded
        self.received = centre.point.copy()  # B̂
        self.errors = np.zeros((case.workers, len(centre.w)))  # e

    def exchanged(self, local: np.ndarray, shares: np.ndarray, f: float) -> np.ndarray:
        case, centre = self.case, self.centre
        moved = shares[:, None] * (local - self.received)
        x = moved.reshape(case.workers, case.devices, -1).sum(1) + self.errors
        q = np.array([self.rounded(row) for row in x])
        self.errors = x - q
        former = centre.w.copy()
        elastic = case.rule == "easgd"
        moved, point = q.sum(0), self.received if elastic else centre.point
        if case.aggregation == "replicated":
            r, point = self.rounded(moved), self.received
            owners = np.arange(len(r)) // -(-len(r) // case.workers)  # of each element
            self.errors[owners, np.arange(len(r))] += moved - r
            moved = r
        centre.sync(local, point + moved, f)
        target = former if elastic else centre.point
        if case.aggregation == "replicated":
            self.received = target.copy()
        else:
            self.received = self.received + self.rounded(target - self.received)
        if elastic:
            alpha = case.rule_options.get("elasticity") or 0.9 / case.replicas
            return local - alpha * (local - self.received)
        return np.array([self.received] * case.replicas)


@dataclasses.dataclass
class Result:
    local: np.ndarray  # [replica, weight]
    averages: dict[str, np.ndarray]  # and "global"
    loss: float  # of the last epoch


class Run:
    """All replicas of a case."""

    def __init__(self, case: Case, initial: np.ndarray, formats: Mapping) -> None:
        self.case = case
        self.local = np.array([np.asarray(initial, np.float64)] * case.replicas)
        self.optimizers = [Optimizer(case) for _ in range(case.replicas)]
        self.pieces = [slice(ENDS[a], ENDS[b]) for a, b in FRAGMENTS[case.fragments]]
        self.centres = [Centre(case, self.local[0][piece]) for piece in self.pieces]
        self.wires = None
        if case.compression != "none":
            rounded = formats[case.compression]
            self.wires = [Wire(case, centre, rounded) for centre in self.centres]
        self.flight = None
        self.begin_blocks()

    def begin_blocks(self) -> None:
        fragments, replicas = self.case.fragments, self.case.replicas
        self.weights = np.zeros((fragments, replicas))  # by which replicas count
        self.taken = np.zeros((fragments, replicas))  # steps
        self.of_devices = np.zeros(replicas)

    def train(self, number: int) -> float:
        fit = self.case.fits[number]
        if number and self.case.resumed_on not in (0, self.case.devices):
            self.go_on(self.case.resumed_on)
        if fit.new_weights:
            start = new_weights(self.case)
            self.local[:] = start
            for piece, centre in zip(self.pieces, self.centres, strict=True):
                centre.set(start[piece])
        for _ in range(fit.epochs):
            loss = self.epoch(number, fit)
        return loss

    def go_on(self, devices: int) -> None:
        """Goes on with other replicas, all from the weights that the rule broadcasts."""
        case = self.case = dataclasses.replace(self.case, devices=devices)
        point = np.concatenate([centre.point for centre in self.centres])
        self.local = np.array([constrained(case, point)] * case.replicas)
        self.optimizers = [Optimizer(case) for _ in range(case.replicas)]
        for centre in self.centres:
            centre.n = case.replicas
        self.begin_blocks()

    def epoch(self, number: int, fit: Fit) -> float:
        case, losses, counts, turns = self.case, [], [], 0
        for step in range(fit.steps):
            for r in range(case.replicas):
                if step >= len(fit.sizes[r]) or not fit.sizes[r][step]:
                    continue
                batch = minibatch(case, number, r, step)
                loss, gradient = loss_and_gradient(case, self.local[r], batch)
                losses.append(loss)
                counts.append(len(batch[1]))
                worker = r // case.devices * case.devices
                own = max(len(s) for s in fit.sizes[worker : worker + case.devices])
                stepped = self.optimizers[r].step(self.local[r], gradient, *fitted(case, fit, own))
                self.local[r] = constrained(case, stepped)
                self.weights[:, r] += divisor(case, batch)
                self.of_devices[r] += divisor(case, batch)
                self.taken[:, r] += 1
            if case.device_sync_period and (step + 1) % case.device_sync_period == 0:
                self.average_devices()
            if self.flight and step + 1 == self.flight[0] + case.overlap:
                self.merge()
            if (step + 1) % fit.sync_period == 0:
                self.begin_sync(turns % case.fragments, step + 1, fit)
                turns += 1
        if case.device_sync_period:
            self.average_devices()
        self.merge()
        for fragment in range(case.fragments):
            if self.weights[fragment].sum():
                self.local[:, self.pieces[fragment]] = self.exchanged(fragment, fit)
                self.constrain()
        return float(np.average(losses, weights=counts))

    def average_devices(self) -> None:
        devices = self.case.devices
        for first in range(0, self.case.replicas, devices):
            own = slice(first, first + devices)
            if self.of_devices[own].sum():
                shares = self.of_devices[own] / self.of_devices[own].sum()
                self.local[own] = constrained(self.case, shares @ self.local[own])
        self.of_devices[:] = 0

    def begin_sync(self, fragment: int, step: int, fit: Fit) -> None:
        piece = self.pieces[fragment]
        before = self.local[:, piece].copy()
        self.flight = (step, piece, before, self.exchanged(fragment, fit))
        if not self.case.overlap:
            self.merge()

    def merge(self) -> None:
        """Puts replicas where the sync leads, plus what they have learned since it began."""
        if self.flight:
            _, piece, before, result = self.flight
            self.local[:, piece] = result + (self.local[:, piece] - before)
            self.constrain()
        self.flight = None

    def constrain(self) -> None:
        """Puts what replicas go on from within the constraint."""
        self.local = np.array([constrained(self.case, w) for w in self.local])

    def exchanged(self, fragment: int, fit: Fit) -> np.ndarray:
        case, piece = self.case, self.pieces[fragment]
        shares = self.weights[fragment] / self.weights[fragment].sum()
        f = self.taken[fragment].max() / (fit.sync_period * case.fragments)
        local = self.local[:, piece]
        if self.wires:
            new = self.wires[fragment].exchanged(local, shares, f)
        else:
            new = self.centres[fragment].sync(local, shares @ local, f)
        self.weights[fragment], self.taken[fragment] = 0, 0
        if case.local_state == "reset":
            for optimizer in self.optimizers:
                optimizer.reset()
        elif case.local_state == "average":
            for k in range(2):
                mean = sum(s * o.slots[k] for s, o in zip(shares, self.optimizers, strict=True))
                for optimizer in self.optimizers:
                    optimizer.slots[k] = mean.copy()
            count = max(o.count for o in self.optimizers)
            for optimizer in self.optimizers:
                optimizer.count = count
        return new


def expected(case: Case, initial: np.ndarray, formats: Mapping) -> Result:
    """Returns what the run must come to."""
    run = Run(case, initial, formats)
    for number in range(len(case.fits)):
        loss = run.train(number)
    shown = {"global": np.concatenate([centre.w for centre in run.centres])}
    for name in case.averages:
        shown[name] = np.concatenate([centre.averages[name].value for centre in run.centres])
    return Result(run.local, {k: constrained(case, v) for k, v in shown.items()}, loss)
