"""A simulation in NumPy, step by step, of overlapped, fragmented and hierarchical syncs.

It is written from the equations, in float64, without any code of tfpara; the rules are those of
`simulation`.
"""

from __future__ import annotations

import numpy as np

from tests.lib.simulation import Global, batch, flat, gradients, unflat


def simulate(
    kind,
    initial,
    minibatches,
    sync_period,
    optimizer,
    *,
    epochs=1,
    delay=0,
    runs=None,
    device_period=None,
    devices=1,
    rounded=None,
    replicated=False,
    within=None,
    **settings,
):
    """Trains len(minibatches) replicas.

    delay: steps after which a sync is merged; with 0 training stops for the sync. runs: for each
    fragment the index of its first variable and that past its last one. devices: the number of
    replicas of a worker, which are averaged every device_period steps. rounded: a function that
    rounds numbers as a format does; each replica then is a worker. replicated: whether each of
    these workers keeps the whole global model. within: a function of the list of weights that puts
    them within their constraints, as is done with what replicas have after each step, mean or sync.

    Returns: flat local models, the flat global model and look-ahead point (without constraints),
    mean loss of the last epoch.
    """
    initial = [np.asarray(w, np.float64) for w in initial]
    ends = np.cumsum([0] + [w.size for w in initial])
    pieces = [slice(ends[a], ends[b]) for a, b in runs or [(0, len(initial))]]
    replicas = len(minibatches)
    start = flat(initial)
    local = np.array([start] * replicas)
    optimizers = [optimizer() for _ in range(replicas)]
    centers = [Global(kind, start[p], replicas, **settings) for p in pieces]
    wires = [Wire(center, rounded, replicated) for center in centers]

    def constrain():
        if within:
            local[:] = [flat(within(unflat(w, initial))) for w in local]

    def average_devices(samples):
        for first in range(0, replicas, devices):
            own = slice(first, first + devices)
            if samples[own].sum():
                shares = samples[own] / samples[own].sum()
                local[own] = shares @ local[own]
        samples[:] = 0
        constrain()

    def exchanged(number, samples, steps):
        """Returns what each replica would go on from if the sync took no time."""
        shares = samples / samples.sum()
        part = steps / (sync_period * len(pieces))
        if rounded:
            return wires[number].exchanged(local[:, pieces[number]], shares, part)
        return np.array(centers[number].sync(list(local[:, pieces[number]]), shares, part))

    for _ in range(epochs):
        losses, sizes_seen = [], []
        samples = np.zeros((len(pieces), replicas))
        steps = np.zeros(len(pieces))
        of_devices = np.zeros(replicas)
        flight = None
        syncs = 0
        for step in range(max(map(len, minibatches))):
            for r, sizes in enumerate(minibatches):
                size = sizes[step] if step < len(sizes) else 0
                if size:
                    weights = unflat(local[r], initial)
                    loss, grads = gradients(weights, *batch(r, step, size))
                    losses.append(loss)
                    sizes_seen.append(size)
                    local[r] = flat(optimizers[r].step(weights, grads))
                    samples[:, r] += size
                    of_devices[r] += size
            constrain()
            steps += 1
            if device_period and (step + 1) % device_period == 0:
                average_devices(of_devices)
            if flight is not None and step + 1 == flight[0] + delay:
                flight = merge(local, flight)
                constrain()
            if (step + 1) % sync_period == 0:
                number = syncs % len(pieces)
                syncs += 1
                result = exchanged(number, samples[number], steps[number])
                samples[number], steps[number] = 0, 0
                flight = (step + 1, pieces[number], local[:, pieces[number]].copy(), result)
                if not delay:
                    flight = merge(local, flight)
                    constrain()
        if device_period:
            average_devices(of_devices)
        if flight is not None:
            merge(local, flight)
            constrain()
        for number, piece in enumerate(pieces):
            if samples[number].sum():
                local[:, piece] = exchanged(number, samples[number], steps[number])
        constrain()
    points = [np.concatenate([getattr(c, of) for c in centers]) for of in ("w", "anchor")]
    return list(local), points, np.average(losses, weights=sizes_seen)


def merge(local, flight):
    """Puts replicas at the result, plus what they have learned since the snapshot."""
    _, piece, snapshot, result = flight
    local[:, piece] = result + (local[:, piece] - snapshot)


class Wire:
    """The rounded exchange of one fragment: what replicas receive, and what rounding left out."""

    def __init__(self, center, rounded, replicated):
        self.center, self.rounded, self.replicated = center, rounded, replicated
        self.point = center.w.copy()
        self.errors = np.zeros((center.n, len(self.point)))

    def by_parts(self, vector):
        """Rounds each of N equal parts of the vector, which is padded with zeros."""
        length = -(-len(vector) // self.center.n)
        padded = np.pad(vector, (0, length * self.center.n - len(vector)))
        return np.concatenate([self.rounded(p) for p in np.split(padded, self.center.n)])[
            : len(vector)
        ]

    def exchanged(self, local, shares, part):
        center = self.center
        sent = shares[:, None] * (local - self.point) + self.errors
        arrived = np.array([self.by_parts(x) for x in sent])
        self.errors = sent - arrived
        former = center.w.copy()
        elastic = center.kind == "elastic"
        # Differences of replicas are counted from the point at which the last sync put them. Under
        # EASGD no sync does so: the rule W ← W + αN(w̄ − W) needs their mean, and the differences
        # are counted from what they had received.
        start = center.anchor if center.kind == "nesterov" else center.w
        moved = arrived.sum(0)
        if self.replicated:
            total, moved = moved, self.by_parts(moved)
            owners = np.arange(len(total)) // -(-len(total) // center.n)
            self.errors[owners, np.arange(len(total))] += total - moved
            start = self.point
        mean = (self.point if elastic else start) + moved
        new = center.step(list(local), mean, part)
        target = former if elastic else new[0]
        if self.replicated:
            self.point = target.copy()
        else:
            self.point = self.point + self.by_parts(target - self.point)
        if elastic:
            return local - center.settings["alpha"] * (local - self.point)
        return np.array([self.point] * center.n)
