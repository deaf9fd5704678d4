"""Counters and histograms for one counting thread, such as a gateway's event loop. They avoid prometheus_client's locks
and look-ups, which cost more than routing a request. Any thread may collect them."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Generic, TypeVar

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import Exemplar, HistogramMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from tandem.catalogue.metrics import Series


class Count:
    """A counter's value for one combination of label values."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        self.value += amount


class BucketCounts:
    """A histogram's counts and sum for one combination of label values."""

    __slots__ = ("_bounds", "_counts", "_exemplars", "_series", "_sum")

    def __init__(self, series: Series) -> None:
        self._series, self._bounds = series, series.buckets
        self._sum = 0.0
        self._counts = [0] * (len(series.buckets) + 1)  # the last one counts values beyond the last bound
        self._exemplars: dict[int, Exemplar] = {}

    def observe(self, value: float, exemplar: Mapping[str, str] | None = None) -> int:
        """Counts a value and returns the index of its bucket. `exemplar`: labels that lead to the value's origin."""
        self._sum += value
        bucket = bisect_left(self._bounds, value)
        self._counts[bucket] += 1
        if exemplar:
            self._exemplars[bucket] = Exemplar(dict(exemplar), value)
        return bucket

    def family(self, labels: Sequence[str]) -> HistogramMetricFamily:
        family = self._series.histogram_family()
        self.add_to(family, labels)
        return family

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        bounds, found = (*map(str, self._bounds), "+Inf"), self._exemplars.copy()
        counts = enumerate(zip(bounds, accumulate(self._counts), strict=True))
        family.add_metric(labels, [(*one, found[at]) if at in found else one for at, one in counts], self._sum)


Cell = TypeVar("Cell", Count, BucketCounts)


class _Tally(Collector, Generic[Cell]):
    """The values of a series, by its label values."""

    def __init__(self, series: Series, registry: CollectorRegistry) -> None:
        self._series = series
        self._found: dict[tuple[str, ...], Cell] = {}
        registry.register(self)

    def labels(self, *values: str) -> Cell:
        if (found := self._found.get(values)) is None:
            assert len(values) == len(self._series.labels), f"{self._series.name} has labels {self._series.labels}"
            found = self._found[values] = self._make()
        return found

    @abstractmethod
    def _make(self) -> Cell:
        """Returns the cell of a new combination of label values."""


class CounterTally(_Tally[Count]):
    def _make(self) -> Count:
        return Count()

    def describe(self) -> Iterator[Metric]:
        yield self._series.family()

    def collect(self) -> Iterator[Metric]:
        family = self._series.family()
        for labels, found in list(self._found.items()):
            family.add_metric(labels, found.value)
        yield family


class HistogramTally(_Tally[BucketCounts]):
    def _make(self) -> BucketCounts:
        return BucketCounts(self._series)

    def describe(self) -> Iterator[Metric]:
        yield self._series.histogram_family()

    def collect(self) -> Iterator[Metric]:
        family = self._series.histogram_family()
        for labels, found in list(self._found.items()):
            found.add_to(family, labels)
        yield family
