"""Prometheus metrics, declared once: the names, what they count, and their documentation (docs/metrics.md is made from this).

Nothing is counted here. The parts of the system count for themselves, and are asked when a scrape comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from prometheus_client import Metric as Family
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

Samples: TypeAlias = Mapping[str, Mapping[tuple[str, ...], float]]
"""By metric: values by label values, in the order of the metric's labels; () where it has none."""


@dataclass(frozen=True)
class Metric:
    """One metric; a counter's name ends in _total."""

    name: str
    kind: Literal["counter", "gauge"]
    text: str
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.kind == "counter") != self.name.endswith("_total"):
            raise ValueError(f"{self.name} is a {self.kind}: exactly counters end in _total")


class Metrics(Collector):
    """Gives a registry what `read` returns at each scrape. Raises KeyError for a metric that was not declared."""

    def __init__(self, declared: Sequence[Metric], read: Callable[[], Samples]) -> None:
        self._declared = {metric.name: metric for metric in declared}
        self._read = read

    def describe(self) -> Iterable[Family]:
        return [_family(metric) for metric in self._declared.values()]

    def collect(self) -> Iterable[Family]:
        for name, samples in self._read().items():
            family = _family(self._declared[name])
            for labels, value in samples.items():
                family.add_metric(labels, value)
            yield family


def _family(metric: Metric) -> CounterMetricFamily | GaugeMetricFamily:
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    return kind(metric.name, metric.text, labels=metric.labels)
