"""Meter: how many images a second training takes."""

from __future__ import annotations

import time


class Meter:
    """Images per second of training, evaluation not counted."""

    def __init__(self) -> None:
        self._images = 0
        self._seconds = 0.0
        self._lap_images = 0
        self._mark = self._started = 0.0

    def start(self) -> None:
        """Begin to count time."""
        self._mark = self._started = time.perf_counter()
        self._lap_images = 0

    def count(self, images: int) -> None:
        """Images of a step whose time is being counted."""
        self._images += images
        self._lap_images += images

    def lap(self) -> float:
        """Images per second since the last lap."""
        now = time.perf_counter()
        speed = self._lap_images / max(now - self._mark, 1e-9)
        self._mark, self._lap_images = now, 0
        return speed

    def stop(self) -> None:
        """Stop counting time."""
        self._seconds += time.perf_counter() - self._started

    @property
    def total(self) -> float | None:
        """Images per second of all that was counted; None without any."""
        return self._images / self._seconds if self._images else None
