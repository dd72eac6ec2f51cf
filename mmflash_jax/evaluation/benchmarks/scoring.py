"""Simple rules for right and wrong, one for each kind of answer.

They are not the official scores, which some benchmarks leave to a judge model: they ask little and
always the same, so that two decoders of one target get the same accuracy if they say the same.

- `relaxed` (ChartQA): numbers within 5 % of the reference, other text equal.
- `letter` (MMStar, MMBench): the option's letter, or its text.
- `number` (MathVista, DynaMath): within the question's tolerance of the reference.
- `text` (CharXiv, MathVerse): equal, or equal numbers, or the same terms between commas.

Case, spaces, markdown, quotes and the full stop at the end never matter; thousands separators,
currency, per cent and unit signs do not matter in numbers.
"""

import math
import re

from mmflash_jax.evaluation.benchmarks.question import LETTERS, Question

RELAXED = 0.05
"""Share of the reference; the rule of the ChartQA paper (Masry et al., 2022)."""

MINUS = "\u2212"
_MARK = re.compile(r"\banswer(?:\s+is)?\s*:", re.IGNORECASE)
_BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
_FRACTION = re.compile(r"(-?)\\d?frac\{([^{}]+)\}\{([^{}]+)\}")
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    rf"[$€£¥]?\s*([-+]?(?:{_DIGITS})(?:e[-+]?\d+)?)(?:\s*/\s*({_DIGITS}))?\s*[%°²³a-z/. ]*",
    re.IGNORECASE,
)
_LETTER_ALONE = re.compile(r"\(?([A-Z])(?:\)|[.:,]|$)")
_LETTER_NAMED = re.compile(
    r"\b(?:option|choice|answer)\s+(?:is\s+)?\(?([A-Z])\b(?!')", re.IGNORECASE
)


def is_right(question: Question, text: str) -> bool | None:
    """Whether the model's whole output answers the question; None if nobody knows the answer."""
    if question.answer is None:
        return None
    said = said_answer(text)
    if not said:
        return False
    match question.rule:
        case "relaxed":
            return _relaxed(said, question.answer)
        case "letter":
            return chosen_letter(said, question.choices) == question.answer.strip().upper()
        case "number":
            return _close(said, question.answer, question.tolerance)
        case "text":
            return same_text(said, question.answer)


def said_answer(text: str) -> str:
    """The final answer of an output: after the last "Answer:", in a box, or else the last line."""
    thought_over = text.rpartition("</think>")[2].replace("**", "").replace("`", "")
    marks = list(_MARK.finditer(thought_over))
    tail = thought_over[marks[-1].end() :] if marks else thought_over
    if boxes := _BOXED.findall(tail):
        return boxes[-1].strip()
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    if not lines:
        return ""
    return lines[0] if marks else lines[-1]


def normalise(text: str) -> str:
    """Text without the differences that never matter."""
    plain = re.sub(r"\s+", " ", text.replace(MINUS, "-")).strip().strip("\"'“”$").strip()
    if re.fullmatch(r"\([A-Za-z]\)", plain):
        plain = plain[1]
    return plain.rstrip(".;:!").rstrip().casefold()


def parse_number(text: str) -> float | None:
    """The number that the text is, signs of currency, per cent and units aside; None if it is none.

    A fraction, as `1/2` or in LaTeX, is its value.
    """
    plain = _FRACTION.sub(r"\1\2/\3", text.replace(MINUS, "-")).replace("\\", "").strip().strip("$")
    found = _NUMBER.fullmatch(plain.strip().rstrip("."))
    if found is None:
        return None
    over, under = (float((part or "1").replace(",", "")) for part in found.groups())
    return over / under if under else None


def chosen_letter(said: str, choices: tuple[str, ...] = ()) -> str | None:
    """The letter of the option that an answer names; None if it names none."""
    for letter, choice in zip(LETTERS, choices, strict=False):
        if normalise(said) == normalise(choice):
            return letter
    plain = said.strip().strip("\"'“”$").strip()
    found = _LETTER_ALONE.match(plain) or _LETTER_NAMED.search(plain)
    if found is None:
        return plain.upper() if len(plain) == 1 and plain.isalpha() else None
    return found[1].upper()


def same_text(said: str, reference: str) -> bool:
    """Equal as text, as numbers or as terms between commas in any order."""
    if normalise(said) == normalise(reference):
        return True
    if _close(said, reference, 0.0):
        return True
    said_terms, terms = (sorted(map(normalise, each.split(","))) for each in (said, reference))
    return len(terms) > 1 and said_terms == terms


def _relaxed(said: str, reference: str) -> bool:
    number, wanted = parse_number(said), parse_number(reference)
    if number is None or not wanted:
        return same_text(said, reference)
    return abs(number - wanted) <= RELAXED * abs(wanted)


def _close(said: str, reference: str, tolerance: float) -> bool:
    number, wanted = parse_number(said), parse_number(reference)
    if number is None or wanted is None:
        return normalise(said) == normalise(reference)
    # Decimal places that binary ones cannot hold must not decide.
    return math.isclose(number, wanted, rel_tol=1e-9, abs_tol=tolerance + 1e-9)
