"""Real tables, cut into slices: one metric of one year (or barley variety) over many entities.

Charts are drawn from slices. Some slices are held out whole, so that an evaluation chart never
shares its table with a training chart. The csv files and their licences are listed in
`tables/SOURCES.md`.
"""

import csv
import functools
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TABLES_DIR = Path(__file__).parent / "tables"
HELD_OUT_YEARS = frozenset({"1972", "2002", "2014"})
HELD_OUT_VARIETIES = frozenset({"Trebi", "Glabron"})

LARGEST_VALUE = 999
FEWEST_ENTITIES = 5  # a slice must fill the largest chart

_MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
# csv column -> (metric as written on the chart, divisor that brings it to 1-999)
_GAPMINDER_METRICS = {
    "lifeExp": ("life expectancy", 1.0),
    "pop": ("population", 1e6),
    "gdpPercap": ("gdp", 100.0),
}


@dataclass(frozen=True)
class TableSlice:
    """One metric of one year or variety; `values` maps 3-letter label to integer."""

    entity: str
    metric: str
    name: str
    values: Mapping[str, int]
    weight: float

    @property
    def held_out(self) -> bool:
        """True when the whole slice is kept for evaluation."""
        variety, _, year = self.name.rpartition("/")
        return year in HELD_OUT_YEARS or variety in HELD_OUT_VARIETIES


@functools.cache
def load_slices(held_out: bool) -> tuple[TableSlice, ...]:
    """All slices of one side of the split, in a fixed order."""
    slices = [*_gapminder_slices(), *_weather_slices(), *_barley_slices()]
    return tuple(
        table
        for table in slices
        if len(table.values) >= FEWEST_ENTITIES and table.held_out == held_out
    )


def _read_rows(file_name: str) -> list[dict[str, str]]:
    with (TABLES_DIR / file_name).open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def _drawable(values: Mapping[str, float]) -> dict[str, int]:
    """Rounded values, without those a chart cannot show."""
    rounded = {label: round(value) for label, value in values.items()}
    return {label: value for label, value in rounded.items() if 1 <= value <= LARGEST_VALUE}


def _gapminder_slices() -> list[TableSlice]:
    rows = _read_rows("gapminder.csv")
    slices = []
    for column, (metric, divisor) in _GAPMINDER_METRICS.items():
        by_year: dict[str, dict[str, float]] = defaultdict(dict)
        for row in rows:
            by_year[row["year"]][row["iso_alpha"]] = float(row[column]) / divisor
        slices += [
            TableSlice("country", metric, year, _drawable(values), weight=1.0)
            for year, values in sorted(by_year.items())
        ]
    return slices


def _weather_slices() -> list[TableSlice]:
    days: dict[str, dict[str, list[dict[str, str]]]] = defaultdict(lambda: defaultdict(list))
    for row in _read_rows("seattle-weather.csv"):
        year, month, _ = row["date"].split("/")
        days[year][_MONTHS[int(month) - 1]].append(row)
    slices = []
    for year, months in sorted(days.items()):
        temperature, rain, wind = {}, {}, {}
        for month, rows in months.items():
            # fsum, because plain sums of floats differ between Python 3.11 and 3.12.
            temperature[month] = math.fsum(float(row["temp_max"]) for row in rows) / len(rows)
            rain[month] = math.fsum(float(row["precipitation"]) for row in rows)
            # Tenths of a metre per second: whole ones hardly differ between months.
            wind[month] = 10 * math.fsum(float(row["wind"]) for row in rows) / len(rows)
        slices += [
            TableSlice("month", metric, year, _drawable(values), weight=2.0)
            for metric, values in (("temperature", temperature), ("rain", rain), ("wind", wind))
        ]
    return slices


def _barley_slices() -> list[TableSlice]:
    yields: dict[str, dict[str, float]] = defaultdict(dict)
    for row in _read_rows("barley.csv"):
        yields[f"{row['variety']}/{row['year']}"][row["site"][:3].upper()] = float(row["yield"])
    # Twenty slices over the same six sites: weighted down, or barley would dominate.
    return [
        TableSlice("site", "yield", name, _drawable(values), weight=0.3)
        for name, values in sorted(yields.items())
    ]
