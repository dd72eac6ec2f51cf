"""Questions about a chart and chain-of-thought answers, with deliberately wide wording.

An answer introduces the chart, reads it out in some order, may add a remark, reasons, and ends with
`Answer: X`. Words are chosen slot by slot, so that a fair share of the answer's tokens can't be
foreseen; otherwise a draft model would learn the template and its acceptance would say nothing.
Part of the wording follows from the picture (which remark is true, what the marks are called), so
that a draft that looks at the picture gains from it.
"""

import random
from dataclasses import dataclass

from mmflash_jax.demo.reasoning import Reading, reason

ANSWER_MARK = "Answer: "

_NUMBER_WORDS = {3: "three", 4: "four", 5: "five"}
_CHART_NAMES = {
    "bar": ("bar chart", "bar plot", "chart with upright bars"),
    "hbar": ("horizontal bar chart", "sideways bar chart", "chart with level bars"),
    "line": ("line chart", "line plot", "chart with a line"),
}
# What each kind of mark does, before the verbs that suit all of them.
_OWN_VERBS = {"bar": "reaches", "hbar": "extends to", "line": "passes"}
_COMMON_VERBS = ("is", "has", "at", "with")
_SEPARATORS = (", ", "; ", ", then ")


@dataclass(frozen=True)
class Exchange:
    """A question with its full answer; `answer` is what follows `Answer: `."""

    question: str
    answer_text: str
    answer: str


def write_exchange(reading: Reading, question_type: str, rng: random.Random) -> Exchange:
    """One question of the given type and its worded answer."""
    reasoning = reason(reading, question_type, rng)
    parts = [_introduction(reading, rng), _lead_in(rng) + _read_out(reading, rng)]
    # Five entities already make a long answer.
    if len(reading.values) < 5 and rng.random() < 0.5:
        parts.append(_remark(reading, rng))
    parts += [reasoning.sentence, f"{ANSWER_MARK}{reasoning.answer}"]
    return Exchange(reasoning.question, " ".join(parts), reasoning.answer)


def _introduction(reading: Reading, rng: random.Random) -> str:
    chart = rng.choice(_CHART_NAMES[reading.kind])
    count = rng.choice((str(len(reading.values)), _NUMBER_WORDS[len(reading.values)]))
    verb = rng.choice(("shows", "gives", "plots", "presents"))
    link = rng.choice(("for", "of", "across"))
    metric, plural = reading.metric, reading.plural
    form = rng.randrange(5)
    if form == 0:
        return f"{metric.capitalize()} {link} {count} {plural}, as a {chart}."
    if form == 1:
        return f"{count.capitalize()} {plural} and their {metric} in a {chart}."
    if form == 2:
        return f"I see a {chart} with {metric} {link} {count} {plural}."
    subject = "This" if form == 3 else "The"
    return f"{subject} {chart} {verb} {metric} {link} {count} {plural}."


def _lead_in(rng: random.Random) -> str:
    return rng.choice(
        (
            "",
            "",
            "Reading the chart: ",
            "Reading it off: ",
            "From the picture: ",
            "The values are: ",
            "Its marks say: ",
            "In turn: ",
        )
    )


def _read_out(reading: Reading, rng: random.Random) -> str:
    """Every label with its value, usually in a shuffled order."""
    pairs = list(zip(reading.labels, reading.values, strict=True))
    order = rng.random()
    if order < 0.6:
        rng.shuffle(pairs)
    elif order < 0.75:
        pairs.reverse()
    usual_verb = rng.choice((_OWN_VERBS[reading.kind], *_COMMON_VERBS))
    separator = rng.choice(_SEPARATORS)
    text = ""
    for index, (label, value) in enumerate(pairs):
        if index:
            last = index == len(pairs) - 1
            text += " and " if last and rng.random() < 0.5 else separator
        text += f"{label} {_read_verb(reading, value, usual_verb, rng)} {value}"
    return text + "."


def _read_verb(reading: Reading, value: int, usual_verb: str, rng: random.Random) -> str:
    """Mostly the answer's usual verb; the extremes often get a verb of their own."""
    draw = rng.random()
    if draw < 0.5 and value == max(reading.values):
        return "peaks at"
    if draw < 0.5 and value == min(reading.values):
        return "dips to"
    return rng.choice(_COMMON_VERBS) if draw > 0.9 else usual_verb


def _remark(reading: Reading, rng: random.Random) -> str:
    """A true sentence that the question did not ask for."""
    ranked = reading.descending()
    (top, most), (bottom, least) = ranked[0], ranked[-1]
    remarks = [
        f"All lie between {least} and {most}.",
        f"The extremes are {top} and {bottom}.",
    ]
    if most >= 3 * least:
        remarks.append(f"{top} is far above {bottom}.")
    elif most <= 1.25 * least:
        remarks.append("They are close together.")
    if reading.kind == "line":
        change = "rises" if reading.values[-1] > reading.values[0] else "falls"
        remarks.append(f"The line {change} from {reading.labels[0]} to {reading.labels[-1]}.")
    else:
        longest = "tallest" if reading.kind == "bar" else "longest"
        remarks.append(f"The {longest} bar is {top}.")
    return rng.choice(remarks)
