"""The online natural gradient in NumPy, from the paper's equations with dense D x D matrices.

Everything is in double precision. F and its inverse are written out, without the shortcuts that
make the method fast.
"""

import numpy as np


class Reference:
    """The method for one side of a layer: R, d and rho, from which F is computed when needed."""

    def __init__(
        self, rank, period=4, history=2000.0, alpha=4.0, epsilon=1e-10, delta=5e-4, eta=None
    ):
        self.rank, self.period, self.history = rank, period, history
        self.alpha, self.epsilon, self.delta, self.eta = alpha, epsilon, delta, eta
        self.seen = 0
        self.r = self.d = self.rho = None

    def fisher(self):
        return self.r.T @ np.diag(self.d) @ self.r + self.rho * np.eye(self.r.shape[1])

    def update(self, x):
        n, width = x.shape
        eta = self.eta or min(1 - np.exp(-n / self.history), 0.9)
        t = eta * (x.T @ x) / n + (1 - eta) * self.fisher()
        y = self.r @ t
        c, u = np.linalg.eigh(y @ y.T)
        c, u = c[::-1], u[:, ::-1]
        root = np.sqrt(np.maximum(c, ((1 - eta) * self.rho) ** 2))
        self.r = np.diag(1 / root) @ u.T @ y
        rho = (np.trace(t) - root.sum()) / (width - self.rank)
        self.d = np.maximum(root - rho, self.epsilon)
        self.rho = max(rho, self.epsilon, self.delta * root.max())

    def step(self, x):
        """Returns the preconditioned rows of a minibatch, and updates F if that is due."""
        x = np.asarray(x, np.float64)
        width = x.shape[1]
        if self.seen == 0:
            self.r = np.zeros((self.rank, width))
            for row in range(self.rank):
                members = np.arange(row, width, self.rank)
                self.r[row, members] = 1 / np.sqrt(len(members))
            self.d, self.rho = np.full(self.rank, self.epsilon), self.epsilon
            for _ in range(3):
                self.update(x)
        f = self.fisher()
        g = f + self.alpha / width * np.trace(f) * np.eye(width)
        turned = x @ np.linalg.inv(g)
        turned *= np.linalg.norm(x) / np.linalg.norm(turned)
        if self.seen < 10 or (self.seen - 10) % self.period == 0:
            self.update(x)
        self.seen += 1
        return turned
