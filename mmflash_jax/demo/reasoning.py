"""The question of each type, with the sentence that reasons and the answer.

Every type has several phrasings of both.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_PLURALS = {"country": "countries", "month": "months", "site": "sites"}


@dataclass(frozen=True)
class Reading:
    """What a chart says, in the order of the picture."""

    entity: str
    metric: str
    kind: str
    labels: Sequence[str]
    values: Sequence[int]

    @property
    def plural(self) -> str:
        return _PLURALS[self.entity]

    def descending(self) -> list[tuple[str, int]]:
        pairs = zip(self.labels, self.values, strict=True)
        return sorted(pairs, key=lambda pair: -pair[1])


@dataclass(frozen=True)
class Reasoning:
    question: str
    sentence: str
    answer: str


def reason(reading: Reading, question_type: str, rng: random.Random) -> Reasoning:
    """Ask and answer one question of the given type, one of `QUESTION_TYPES`."""
    return _REASONERS[question_type](reading, rng)


def _two_indices(reading: Reading, rng: random.Random) -> tuple[int, int]:
    first, second = rng.sample(range(len(reading.values)), 2)
    return first, second


def _value(reading: Reading, rng: random.Random) -> Reasoning:
    index = rng.randrange(len(reading.values))
    label, value = reading.labels[index], reading.values[index]
    question = rng.choice(
        (
            f"What is the {reading.metric} of {label}?",
            f"What value does the chart show for {label}?",
            f"Read the value of {label}.",
            f"How much does {label} have?",
        )
    )
    sentence = rng.choice(
        (
            f"The value for {label} is {value}.",
            f"So {label} has {value}.",
            f"Next to {label} stands {value}.",
            f"That puts {label} at {value}.",
        )
    )
    return Reasoning(question, sentence, str(value))


def _max(reading: Reading, rng: random.Random) -> Reasoning:
    label, value = reading.descending()[0]
    question = rng.choice(
        (
            f"Which {reading.entity} has the highest {reading.metric}?",
            f"Which {reading.entity} is the largest?",
            "Which one is on top?",
            "Where is the peak of this chart?",
        )
    )
    sentence = rng.choice(
        (
            f"The highest value is {value}, which belongs to {label}.",
            f"The largest of these is {label} with {value}.",
            f"Nothing beats {value}, so {label} leads.",
            f"{label} leads with {value}.",
        )
    )
    return Reasoning(question, sentence, label)


def _min(reading: Reading, rng: random.Random) -> Reasoning:
    label, value = reading.descending()[-1]
    question = rng.choice(
        (
            f"Which {reading.entity} has the lowest {reading.metric}?",
            f"Which {reading.entity} is the smallest?",
            "Which one comes last?",
            "Where is the lowest point of this chart?",
        )
    )
    sentence = rng.choice(
        (
            f"The lowest value is {value}, which belongs to {label}.",
            f"The smallest of these is {label} with {value}.",
            f"Nothing is under {value}, so {label} trails.",
            f"{label} trails with {value}.",
        )
    )
    return Reasoning(question, sentence, label)


def _difference(reading: Reading, rng: random.Random) -> Reasoning:
    first, second = _two_indices(reading, rng)
    larger = max(reading.values[first], reading.values[second])
    smaller = min(reading.values[first], reading.values[second])
    result = larger - smaller
    one, other = reading.labels[first], reading.labels[second]
    question = rng.choice(
        (
            f"What is the difference between {one} and {other}?",
            f"How far apart are {one} and {other}?",
            f"By how much do {one} and {other} differ?",
        )
    )
    sentence = rng.choice(
        (
            f"The difference is {larger} - {smaller} = {result}.",
            f"Subtracting: {larger} - {smaller} = {result}.",
            f"From {larger} take away {smaller}: {result}.",
            f"{larger} minus {smaller} leaves {result}.",
        )
    )
    return Reasoning(question, sentence, str(result))


def _sum(reading: Reading, rng: random.Random) -> Reasoning:
    first, second = _two_indices(reading, rng)
    left, right = reading.values[first], reading.values[second]
    one, other = reading.labels[first], reading.labels[second]
    question = rng.choice(
        (
            f"What is the sum of {one} and {other}?",
            f"Add {one} and {other}.",
            f"What do {one} and {other} make together?",
        )
    )
    sentence = rng.choice(
        (
            f"The sum is {left} + {right} = {left + right}.",
            f"Adding: {left} + {right} = {left + right}.",
            f"Together {left} and {right} make {left + right}.",
            f"{left} plus {right} gives {left + right}.",
        )
    )
    return Reasoning(question, sentence, str(left + right))


def _compare(reading: Reading, rng: random.Random) -> Reasoning:
    first, second = _two_indices(reading, rng)
    one, other = reading.labels[first], reading.labels[second]
    winner, loser = sorted((first, second), key=lambda index: -reading.values[index])
    more, less = reading.values[winner], reading.values[loser]
    name, beaten = reading.labels[winner], reading.labels[loser]
    question = rng.choice(
        (
            f"Is {one} or {other} higher?",
            f"Which is larger, {one} or {other}?",
            f"Does {one} or {other} come out ahead?",
        )
    )
    sentence = rng.choice(
        (
            f"{name} has {more} and {beaten} has {less}, so {name} is higher.",
            f"{more} is more than {less}, so it is {name}.",
            f"Comparing {more} with {less}, {name} wins.",
            f"As {less} is below {more}, it must be {name}.",
        )
    )
    return Reasoning(question, sentence, name)


def _second(reading: Reading, rng: random.Random) -> Reasoning:
    (top, most), (runner_up, value) = reading.descending()[:2]
    question = rng.choice(
        (
            f"Which {reading.entity} has the second highest {reading.metric}?",
            "Which one is second?",
            f"Which {reading.entity} comes right after the top?",
        )
    )
    sentence = rng.choice(
        (
            f"The highest is {top} with {most}, then {runner_up} with {value}.",
            f"After {top} comes {runner_up}.",
            f"Only {most} is above {value}, so {runner_up} is second.",
            f"{top} is first and {runner_up} follows with {value}.",
        )
    )
    return Reasoning(question, sentence, runner_up)


def _rank(reading: Reading, rng: random.Random) -> Reasoning:
    ranked = reading.descending()
    question = rng.choice(
        (
            "Rank the chart from highest to lowest.",
            f"Sort the {reading.plural} in descending order.",
            f"List the {reading.plural} from largest to smallest.",
        )
    )
    opening = rng.choice(
        ("From highest to lowest: ", "Sorted by value: ", "Going down: ", "The order is ")
    )
    sentence = opening + ", ".join(str(value) for _, value in ranked) + "."
    return Reasoning(question, sentence, ", ".join(label for label, _ in ranked))


def _count(reading: Reading, rng: random.Random) -> Reasoning:
    count = len(reading.values)
    question = rng.choice(
        (
            f"How many {reading.plural} are shown?",
            "How many data points are in the chart?",
            "Count the marks in this chart.",
        )
    )
    sentence = rng.choice(
        (
            f"There are {count} of them.",
            f"That makes {count} {reading.plural}.",
            f"Counting them gives {count}.",
            f"In all {count} are drawn.",
        )
    )
    return Reasoning(question, sentence, str(count))


def _describe(reading: Reading, rng: random.Random) -> Reasoning:
    """The answer is the metric, which only the title in the picture tells."""
    ranked = reading.descending()
    (top, most), (bottom, least) = ranked[0], ranked[-1]
    question = rng.choice(
        (
            "Describe the chart.",
            "What does this chart show?",
            "Read the chart aloud.",
            "What is this picture about?",
        )
    )
    sentence = rng.choice(
        (
            f"The highest is {top} with {most} and the lowest is {bottom} with {least}.",
            f"It goes from {least} for {bottom} to {most} for {top}.",
            f"Its title is {reading.metric}.",
            f"So it is about {reading.metric}, led by {top}.",
        )
    )
    return Reasoning(question, sentence, reading.metric)


_REASONERS: dict[str, Callable[[Reading, random.Random], Reasoning]] = {
    "value": _value,
    "max": _max,
    "min": _min,
    "difference": _difference,
    "sum": _sum,
    "compare": _compare,
    "second": _second,
    "rank": _rank,
    "count": _count,
    "describe": _describe,
}
QUESTION_TYPES = tuple(_REASONERS)
