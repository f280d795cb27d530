"""The recurrence of ring_delayed in one process, written down once more: W(t+1) = W(t) - lr * Nesterov(mean g(W(t-1)))."""

import numpy as np

import minidnn
from minidnn.scalars import Scalar


class Simulator:
    """N ranks, one after another. Gradients come from plain steps; exchange and update are NumPy, shard by shard."""

    def __init__(self, graph, ranks, optimizer, *, delayed=True, seed=0):
        self.graph, self.ranks, self.optimizer, self.delayed, self.seed = graph, ranks, optimizer, delayed, seed
        self.steps, self.pending = 0, None
        self.plain = {}  # local batch -> step
        one = minidnn.compile(graph, optimizer=optimizer, seed=seed)
        self.places, end = {}, 0
        for node in graph.nodes:
            keys = [p for p in node.parameters if p.trainable]
            at = end
            for p in keys:
                self.places[p.name] = (at, p.shape)
                at += int(np.prod(p.shape))
            end += -(-sum(int(np.prod(p.shape)) for p in keys) // 64) * 64
        self.size = -(-end // (64 * ranks)) * 64 * ranks
        self.weights = self.flat({n: v for n, v in self.read(one).items() if n in self.places})
        self.velocity = np.zeros_like(self.weights)

    @staticmethod
    def read(step):
        state = step.executor_state
        step.executor.device.synchronize()
        return {n: state._read(v) for n, v in state._persistent.parameters.items()}

    def flat(self, arrays):
        line = np.zeros(self.size, np.float32)
        for name, array in arrays.items():
            at, shape = self.places[name]
            line[at : at + int(np.prod(shape))] = np.asarray(array).reshape(-1)
        return line

    def gradient(self, rank, x, y, whole):
        """This rank's gradient of the mean loss over all samples, at the present weights."""
        step = self.plain.get(len(x))
        if step is None:
            graph = self.graph.with_batch(len(x))
            step = self.plain[len(x)] = minidnn.compile(graph, optimizer=self.optimizer, seed=self.seed)
        state = step.executor_state
        for name, (at, shape) in self.places.items():
            part = self.weights[at : at + int(np.prod(shape))].reshape(shape)
            state._write(state._persistent.parameters[name], part)
        step.rank, step.steps = rank, self.steps
        step._submit("gradients", x, y, 0.0, 1.0 / whole, 1.0, 1)
        step.executor.device.synchronize()
        results = step.executor.bound("gradients").results
        return self.flat({n: results[n] for n in self.places})

    def reduced(self, gradients):
        """The sums in the order in which a shard travels: it begins behind its owner and ends there."""
        shard, n, total = self.size // self.ranks, self.ranks, np.empty(self.size, np.float32)
        for owner in range(n):
            part = slice(owner * shard, (owner + 1) * shard)
            order = [(owner + 1 + k) % n for k in range(n)]
            sum_ = gradients[order[0]][part].copy()
            for rank in order[1:]:
                sum_ = gradients[rank][part] + sum_
            total[part] = sum_
        return total

    def update(self, gradient, lr):
        o = self.optimizer
        scalars = np.zeros(len(Scalar), np.float32)
        scalars[Scalar.LR] = lr
        g = gradient * np.float32(1) + self.weights * np.float32(o.weight_decay)
        self.velocity = self.velocity * np.float32(o.momentum) + g
        t = self.velocity * np.float32(o.momentum) + g if o.nesterov else self.velocity
        self.weights = self.weights - t * scalars[Scalar.LR]

    def run(self, x, y, lr):
        whole, gradients = len(x), []
        for rank in range(self.ranks):
            sizes = [whole // self.ranks + (r < whole % self.ranks) for r in range(self.ranks)]
            begin, count = sum(sizes[:rank]), sizes[rank]
            if count:
                gradients.append(self.gradient(rank, x[begin : begin + count], y[begin : begin + count], whole))
            else:
                gradients.append(np.zeros(self.size, np.float32))
        now = (self.reduced(gradients), lr)
        if self.delayed:
            if self.pending is not None:
                self.update(*self.pending)
            self.pending = now
        else:
            self.update(*now)
        self.steps += 1

    def flush(self):
        if self.pending is not None:
            self.update(*self.pending)
            self.pending = None

    def parameters(self):
        return {n: self.weights[at : at + int(np.prod(shape))].reshape(shape) for n, (at, shape) in self.places.items()}
