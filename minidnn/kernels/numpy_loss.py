"""NumPy kernels: softmax with cross-entropy."""

from __future__ import annotations

import numpy as np

from minidnn.kernels.base import Array
from minidnn.kernels.numpy_chunks import chunk_elements, spans
from minidnn.scalars import Scalar


def softmax_cross_entropy_forward(
    loss: Array, probabilities: Array, logits: Array, labels: Array, *, smoothing: float
) -> None:
    samples, classes = logits.shape
    total = 0.0
    for span in spans(samples, max(1, chunk_elements(logits) // classes)):
        z, p, label = logits[span], probabilities[span], labels[span]
        top = np.maximum.reduce(z, axis=1, keepdims=True)
        np.subtract(z, top, out=p)
        # -sum q log p = log(sum exp z) - (1 - smoothing) * z[label] - smoothing * mean(z), for z shifted by its maximum
        chosen = p[np.arange(len(p)), label].astype(np.float64)
        average = np.add.reduce(p, axis=1) / classes if smoothing else 0.0
        np.exp(p, out=p)
        norm = np.add.reduce(p, axis=1, keepdims=True)
        np.divide(p, norm, out=p)
        each = np.log(norm[:, 0].astype(np.float64)) - (1.0 - smoothing) * chosen - smoothing * average
        total += float(np.add.reduce(each))
    loss[...] = total / samples


def softmax_cross_entropy_backward(
    d_logits: Array, probabilities: Array, labels: Array, scalars: Array, *, smoothing: float
) -> None:
    samples, classes = probabilities.shape
    weight = float(scalars[Scalar.LOSS_WEIGHT])
    for span in spans(samples, max(1, chunk_elements(d_logits) // classes)):
        d, label = d_logits[span], labels[span]
        np.subtract(probabilities[span], smoothing / classes, out=d)
        d[np.arange(len(d)), label] -= 1.0 - smoothing
        np.multiply(d, weight, out=d)
