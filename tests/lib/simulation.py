"""A simulation in NumPy of what the cluster should compute: networks, momentum SGD, every rule.

It is written from the equations, in float64, without any code of tfpara.
"""

from __future__ import annotations

import numpy as np


def batch(replica: int, step: int, size: int):
    """Returns the same minibatch that programs/train_small.py draws."""
    rng = np.random.default_rng([replica, step])
    return rng.normal(size=(size, 6)).astype("float32"), rng.integers(0, 5, size).astype("int32")


def gradients(weights, x, y):
    """Returns the cross-entropy of the 6-7-5 tanh network, and its gradients."""
    w1, b1, w2, b2 = weights
    hidden = np.tanh(x @ w1 + b1)
    logits = hidden @ w2 + b2
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    loss = -np.log(p[np.arange(len(y)), y]).mean()
    p[np.arange(len(y)), y] -= 1
    p /= len(y)
    back = (p @ w2.T) * (1 - hidden**2)
    return loss, [x.T @ back, back.sum(0), hidden.T @ p, p.sum(0)]


class Momentum:
    """SGD with momentum: m ← μm − lr·g;  w ← w + m."""

    def __init__(self, learning_rate, momentum):
        self.learning_rate, self.momentum, self.buffers = learning_rate, momentum, None

    def step(self, weights, grads):
        if self.buffers is None:
            self.reset(weights)
        self.buffers = [
            self.momentum * m - self.learning_rate * g
            for m, g in zip(self.buffers, grads, strict=True)
        ]
        return [w + m for w, m in zip(weights, self.buffers, strict=True)]

    def reset(self, weights):
        self.buffers = [np.zeros_like(w) for w in weights]


class Adam:
    """Adam: w ← w − lr √(1 − β₂^t) / (1 − β₁^t) · m / (√v + ε)."""

    def __init__(self, learning_rate):
        self.rate, self.t, self.m, self.v = learning_rate, 0, 0.0, 0.0

    def step(self, weights, grads):
        gradient = flat(grads)
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * gradient
        self.v = 0.999 * self.v + 0.001 * gradient**2
        rate = self.rate * np.sqrt(1 - 0.999**self.t) / (1 - 0.9**self.t)
        moved = flat(weights) - rate * self.m / (np.sqrt(self.v) + 1e-7)
        return unflat(moved, weights)


def within(weights):
    """The network's weights within the constraints of `replicas_here.network`."""
    w1, b1, w2, b2 = weights
    norms = np.sqrt((w1**2).sum(0, keepdims=True))
    return [w1 / (1e-7 + norms), np.maximum(b1, 0.0), np.clip(w2, -0.3, 0.3), b2]


class Global:
    """The rules. `sync` takes the flat local models and shares; it gives the new local models."""

    def __init__(self, kind, start, replicas, **settings):
        self.kind, self.settings, self.n = kind, settings, replicas
        self.w, self.delta = start.copy(), np.zeros_like(start)
        self.anchor = start.copy()
        self.history, self.parts = [start.copy()], []

    def sync(self, local, shares, part=1.0):
        """Returns the new local models; `part` is the share of a whole block that the block was."""
        mean = sum(s * w for s, w in zip(shares, local, strict=True))
        new = self.step(local, mean, part)
        self.history.append(self.w.copy())
        self.parts.append(part)
        return new

    def step(self, local, mean, part):
        """Returns the new local models after a block, or after a part of one.

        A part takes that part of the step that the whole block would have taken at the same pace.
        """
        whole = getattr(self, self.kind)
        if part == 1.0 or self.kind in ("bsp", "elastic"):
            return whole(local, mean, **self.settings)
        start = self.anchor if self.kind == "nesterov" else self.w
        before = self.w, self.delta
        whole(local, start + (mean - start) / part, **self.settings)
        self.w, self.delta = (
            old + part * (new - old) for old, new in zip(before, (self.w, self.delta), strict=True)
        )
        done = sum(self.parts) + part
        ahead = self.momentum(done) * self.delta if self.kind == "nesterov" else 0.0
        self.anchor = self.w + ahead
        return [self.anchor.copy() for _ in local]

    def bsp(self, local, mean):
        self.w = mean
        return [mean.copy() for _ in local]

    def classical(self, local, mean, eta, zeta=1.0):
        self.delta = eta * self.delta + zeta * (mean - self.w)
        self.w = self.w + self.delta
        return [self.w.copy() for _ in local]

    def momentum(self, blocks):
        """The block momentum after so many blocks; with a warm-up it is that of an average."""
        eta = self.settings["eta"]
        return min(eta, blocks / (blocks + 1.0)) if self.settings.get("warmup") else eta

    def nesterov(self, local, mean, eta, zeta=1.0, warmup=False):
        done = sum(self.parts)
        self.delta = self.momentum(done) * self.delta + zeta * (mean - self.anchor)
        self.w = self.w + self.delta
        self.anchor = self.w + self.momentum(done + 1.0) * self.delta
        return [self.anchor.copy() for _ in local]

    def lookahead_anchor(self, local, mean, eta, gain):
        self.delta = eta * self.delta + gain * (mean - self.w)
        self.w = self.w + self.delta
        self.w = self.w + eta * self.delta
        return [self.w.copy() for _ in local]

    def elastic(self, local, mean, alpha):
        new = [w - alpha * (w - self.w) for w in local]
        self.w = self.w + alpha * self.n * (mean - self.w)
        return new


def flat(weights):
    return np.concatenate([np.ravel(w) for w in weights])


def unflat(vector, like):
    out, at = [], 0
    for w in like:
        out.append(vector[at : at + w.size].reshape(w.shape))
        at += w.size
    return out


def simulate(
    kind, initial, minibatches, sync_period, optimizer, epochs=1, local_state="keep", **settings
):
    """Trains len(minibatches) replicas; an optimizer may have `gradients` of its own.

    Returns: flat local models, Global, mean loss of the last epoch over all samples.
    """
    initial = [np.asarray(w, np.float64) for w in initial]
    replicas = len(minibatches)
    local = [initial for _ in range(replicas)]
    optimizers = [optimizer() for _ in range(replicas)]
    center = Global(kind, flat(initial), replicas, **settings)
    for _ in range(epochs):
        losses, sizes_seen = [], []
        for start in range(0, max(map(len, minibatches)), sync_period):
            samples = [0] * replicas
            for r, sizes in enumerate(minibatches):
                for step, size in list(enumerate(sizes))[start : start + sync_period]:
                    if size:
                        of_optimizer = getattr(optimizers[r], "gradients", gradients)
                        loss, grads = of_optimizer(local[r], *batch(r, step, size))
                        losses.append(loss)
                        sizes_seen.append(size)
                        local[r] = optimizers[r].step(local[r], grads)
                        samples[r] += size
            if not sum(samples):
                continue
            shares = [s / sum(samples) for s in samples]
            steps = min(sync_period, max(map(len, minibatches)) - start)
            new = center.sync([flat(w) for w in local], shares, steps / sync_period)
            local = [unflat(w, initial) for w in new]
            if local_state == "reset":
                for o, w in zip(optimizers, local, strict=True):
                    o.reset(w)
            elif local_state == "average":
                means = [
                    sum(s * o.buffers[i] for s, o in zip(shares, optimizers, strict=True))
                    for i in range(len(initial))
                ]
                for o in optimizers:
                    o.buffers = [m.copy() for m in means]
    return [flat(w) for w in local], center, np.average(losses, weights=sizes_seen)
