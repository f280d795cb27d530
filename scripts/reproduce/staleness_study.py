"""Which runs the comparison with and without delay takes, in which order, and what they say together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from figures import markdown, signed
from staleness_runs import MOMENTA, Results, Setting

TARGET_POINTS = 0.5
COMPARED = (("delay_0", 0), ("delay_1", 1), ("delay_1_own_rate", 1))
"""What is compared for a net and a kind of momentum, and its delay."""


class Study(NamedTuple):
    """The nets, each with the rates of its sweep in rising order, and the seeds 0 to ``seeds - 1``."""

    rates: Mapping[str, Sequence[float]]
    seeds: int

    def sweep(self, net: str, momentum: str, delay: int) -> list[Setting]:
        """One run a rate, on seed 0."""
        return [Setting(net, momentum, delay, rate, 0) for rate in self.rates[net]]

    def best(self, results: Results, net: str, momentum: str, delay: int) -> float | None:
        """The rate at which the sweep did best, of those at which no seed is known to diverge; None if not all of it is there."""

        def steady(setting: Setting) -> bool:
            made = (results.get(setting._replace(seed=seed)) for seed in range(self.seeds))
            return not any(result is not None and "diverged" in result for result in made)

        found = [(setting, results.get(setting)) for setting in self.sweep(net, momentum, delay)]
        known = [(steady(setting), last(result), setting.rate) for setting, result in found if result is not None]
        return max(known)[-1] if len(known) == len(found) else None

    def chosen(self, results: Results, net: str, momentum: str) -> dict[str, float | None]:
        """The rates of what is compared: that of the run without delay for both, and the delayed run's own."""
        tuned, own = (self.best(results, net, momentum, delay) for delay in (0, 1))
        return {"delay_0": tuned, "delay_1": tuned, "delay_1_own_rate": own}

    def wanted(self, results: Results) -> list[Setting]:
        """All runs that are known to be needed: the sweeps and, where these are done, the runs over the seeds."""

        def each() -> Iterator[Setting]:
            for net in self.rates:
                for momentum in MOMENTA:
                    for delay in (0, 1):
                        yield from self.sweep(net, momentum, delay)
                    rates = self.chosen(results, net, momentum)
                    for what, delay in COMPARED:
                        if (rate := rates[what]) is not None:
                            yield from (Setting(net, momentum, delay, rate, seed) for seed in range(self.seeds))

        return list(dict.fromkeys(each()))

    def missing(self, results: Results) -> list[Setting]:
        """Those of them that have not been made."""
        return [setting for setting in self.wanted(results) if results.get(setting) is None]


class Order:
    """Says which run is next: for each net first those that must have the machine to themselves, then the longest.

    Alone go one run without delay and one with it, for the seconds of an epoch, which mean nothing where runs share a GPU. On a
    GPU (``measures``) one run of each net is alone at any rate: it measures engines, undisturbed, into the cache on the disk,
    and the others find them there. ``deadline``: of ``time.monotonic``, after which no run is begun.
    """

    def __init__(self, study: Study, results: Results, *, measures: bool, deadline: float) -> None:
        self._study, self._results, self._deadline = study, results, deadline
        missing = study.missing(results)
        self._alone: list[Setting] = []
        for net in study.rates:
            left = [setting for setting in missing if setting.net == net]
            timed = [Setting(net, "nesterov", delay, study.rates[net][0], 0) for delay in (0, 1)]
            first = [setting for setting in timed if setting in left] or (left[:1] if measures else [])
            self._alone += first
        self.alone = frozenset(self._alone)

    def __call__(self, under_way: Sequence[Setting]) -> Setting | None:
        """The next run to begin beside those under way; None: none now."""
        if time.monotonic() >= self._deadline or any(setting in self.alone for setting in under_way):
            return None
        if self._alone:
            return None if under_way else self._alone.pop(0)
        ready = [setting for setting in self._study.missing(self._results) if setting not in under_way]
        return max(ready, key=lambda setting: self._seconds(setting.net), default=None)

    def _seconds(self, net: str) -> float:
        """How long a run of a net takes, as far as is known."""
        made = (result for s in self._study.wanted(self._results) if s.net == net and (result := self._results.get(s)))
        return max((result["seconds"][-1] for result in made if result["seconds"]), default=0.0)


def last(result: Mapping[str, Any]) -> float:
    """Accuracy after the last epoch; 0 where it diverged."""
    return 0.0 if "diverged" in result else float(result["acc1"][-1])


def compare(study: Study, results: Results, net: str, momentum: str) -> dict[str, Any]:
    """The sweep, and delay 0 and 1 at the rates it chose, over the seeds; None for what runs that are missing would say."""
    swept = zip(*(study.sweep(net, momentum, delay) for delay in (0, 1)), strict=True)
    row: dict[str, Any] = {"net": net, "momentum": momentum, "sweep": []}
    for pair in swept:
        found = [None if (result := results.get(setting)) is None else last(result) for setting in pair]
        row["sweep"].append({"rate": pair[0].rate, "delay_0": found[0], "delay_1": found[1]})
    rates = study.chosen(results, net, momentum)
    row["tuned_rate"] = rates["delay_0"]
    for what, delay in COMPARED:
        row[what] = _over_seeds(study, results, Setting(net, momentum, delay, rates[what] or 0.0, 0))
    for what in ("delay_1", "delay_1_own_rate"):
        whole = not row[what]["missing"] and not row["delay_0"]["missing"]
        row[what]["points"] = 100 * (row[what]["mean_acc1"] - row["delay_0"]["mean_acc1"]) if whole else None
        row[what]["within_target"] = row[what]["points"] >= -TARGET_POINTS if whole else None
    return row


def _over_seeds(study: Study, results: Results, setting: Setting) -> dict[str, Any]:
    """What the runs of a setting over all seeds say. ``rate`` 0: it is not known yet."""
    found = [results.get(setting._replace(seed=seed)) for seed in range(study.seeds)]
    made = [result for result in found if result is not None]
    accuracy = [last(result) for result in made]
    return {
        "rate": setting.rate or None,
        "acc1": accuracy,
        "missing": len(found) - len(made),
        "diverged": sum("diverged" in result for result in made),
        "mean_acc1": statistics.fmean(accuracy) if made else None,
        "deviation": statistics.stdev(accuracy) if len(made) > 1 else 0.0,
        "by_epoch": _means([result["acc1"] for result in made]),
        "seconds_by_epoch": _means(_seconds_alone(study, results, setting)),
    }


def _seconds_alone(study: Study, results: Results, setting: Setting) -> list[list[float]]:
    """Seconds until the end of each epoch, of whole runs that had the machine to themselves: any rate, momentum and seed takes as
    long."""
    kin = (s for s in study.wanted(results) if (s.net, s.delay) == (setting.net, setting.delay))
    made = [result for s in kin if (result := results.get(s)) is not None]
    return [result["seconds"] for result in made if result["alone"] and "diverged" not in result]


def _means(curves: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.fmean(values) for values in zip(*curves, strict=False)]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The comparison, the accuracy by epoch, and the sweep; what could not be made is ``missing``."""
    head = ("net", "momentum", "delay", "lr", "accuracy", "diverged", "points over delay 0", "within 0.5")
    cells, curves, epochs = [], [], max((len(row[what]["by_epoch"]) for row in rows for what, _ in COMPARED), default=0)
    shown = sorted({max(1, round(epochs * k / 6)) for k in range(1, 7)})
    for row in rows:
        for what, _ in COMPARED:
            at, name = row[what], (row["net"], row["momentum"], what.replace("_", " "))
            rate = "missing" if at["rate"] is None else f"{at['rate']:g}"
            accuracy = f"{100 * at['mean_acc1']:.2f} ± {100 * at['deviation']:.2f}" if at["acc1"] else ""
            if at["missing"]:
                seeds = len(at["acc1"]) + at["missing"]
                accuracy = f"{accuracy} ({at['missing']} of {seeds} missing)" if accuracy else "missing"
            known = at.get("points") is not None
            verdict = (signed(at["points"], 2), "yes" if at["within_target"] else "no") if known else (None, None)
            cells.append((*name, rate, accuracy, at["diverged"], *verdict))
            curve = [_percent(at["by_epoch"][k - 1 : k]) for k in shown]
            seconds = f"{at['seconds_by_epoch'][-1]:.1f}" if at["seconds_by_epoch"] else "missing"
            curves.append((*name, *curve, seconds))
    swept = [
        (row["net"], row["momentum"], f"{at['rate']:g}", *(_percent([at[f"delay_{delay}"]]) for delay in (0, 1)))
        for row in rows
        for at in row["sweep"]
    ]
    by_epoch = ("net", "momentum", "delay", *(f"epoch {k}" for k in shown), "seconds, alone")
    parts = [markdown(head, cells), markdown(by_epoch, curves)]
    parts += [markdown(("net", "momentum", "lr", "delay 0", "delay 1"), swept), *_edges(rows)]
    return "\n\n".join(parts)


def _percent(accuracy: Sequence[float | None]) -> str:
    """Of one value or none."""
    return "missing" if not accuracy or accuracy[0] is None else f"{accuracy[0]:.2%}"


def _edges(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where the best rate is the least or the greatest of a sweep, and a better one may lie outside."""
    return [
        f"{row['net']}, {row['momentum']}, {what.replace('_', ' ')}: {row[what]['rate']:g} is at an end of the sweep; add --rates"
        for row in rows
        for what in ("delay_0", "delay_1_own_rate")
        if len(row["sweep"]) > 1 and row[what]["rate"] in (row["sweep"][0]["rate"], row["sweep"][-1]["rate"])
    ]
