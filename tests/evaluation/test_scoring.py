"""Rules for right and wrong, case by case."""

import pytest

from mmflash_jax.evaluation.benchmarks import Question, is_right
from mmflash_jax.evaluation.benchmarks.scoring import (
    chosen_letter,
    parse_number,
    said_answer,
)


def question(rule, answer, choices=(), tolerance=0.0) -> Question:
    return Question(
        id="1", text="?", images=(), answer=answer, rule=rule, choices=choices, tolerance=tolerance
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("It is 3.\nAnswer: 4", "4"),
        ("Answer: 3, no.\nFinal answer: 4\nThat is all.", "4"),
        ("**Answer:** `4`", "4"),
        ("The answer is: 4", "4"),
        ("<think>Answer: 3</think>\n4", "4"),
        ("So \\boxed{\\frac{1}{2}} it is", "\\frac{1}{2}"),
        ("Answer: $\\boxed{4}$", "4"),
        ("first\nlast line\n\n", "last line"),
        ("Answer:\n\n4\n", "4"),
        ("Answer:", ""),
        ("", ""),
    ],
)
def test_the_final_answer(text, said):
    assert said_answer(text) == said


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("14", 14.0),
        ("-1,234.5", -1234.5),
        ("\N{MINUS SIGN}3", -3.0),
        ("$1.5", 1.5),
        ("35%", 35.0),
        ("35 %.", 35.0),
        ("5 cm", 5.0),
        ("45°", 45.0),
        ("1/2", 0.5),
        ("-\\frac{1}{4}", -0.25),
        ("$5$", 5.0),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("3 of 4", None),
        ("1/0", None),
        ("two", None),
        ("12 and 13", None),
        ("", None),
    ],
)
def test_numbers(text, number):
    assert parse_number(text) == number


@pytest.mark.parametrize(
    ("said", "answer", "right"),
    [
        ("14.7", "14", True),
        ("14.71", "14", False),
        ("13.3", "14", True),
        ("norway.", "Norway", True),
        ("Sweden", "Norway", False),
        ("0", "0", True),
        ("0.01", "0", False),
        ("45%", "45", True),
        ("Yes, No", "no, yes", True),
    ],
)
def test_relaxed(said, answer, right):
    assert is_right(question("relaxed", answer), f"Answer: {said}") is right


@pytest.mark.parametrize(
    ("said", "letter"),
    [
        ("B", "B"),
        ("(B)", "B"),
        ("b", "B"),
        ("B. blue", "B"),
        ("(B) blue", "B"),
        ("Option B", "B"),
        ("the right choice is B.", "B"),
        ("blue", "B"),
        ("A blue sky", None),
        ("none of them", None),
        ("42", None),
    ],
)
def test_letters(said, letter):
    assert chosen_letter(said, ("red", "blue")) == letter
    asked = question("letter", "B", ("red", "blue"))
    assert is_right(asked, f"Answer: {said}") is (letter == "B")


@pytest.mark.parametrize(
    ("said", "answer", "tolerance", "right"),
    [
        ("2.6675", "2.667", 1e-3, True),
        ("2.669", "2.667", 1e-3, False),
        ("4", "4", 0.0, True),
        ("4.0", "4", 0.0, True),
        ("5", "4", 0.0, False),
        ("1.24", "1.2", 0.05, True),
        ("1.26", "1.2", 0.05, False),
        ("Not applicable", "Not Applicable", 0.5, True),
        ("one", "1", 0.0, False),
    ],
)
def test_number(said, answer, tolerance, right):
    assert is_right(question("number", answer, (), tolerance), f"Answer: {said}") is right


@pytest.mark.parametrize(
    ("said", "answer", "right"),
    [
        ("'lambda = 0.13'", "lambda = 0.13", True),
        ("(b)", "b", True),
        ("1,500", "1500", True),
        ("\\frac{1}{2}", "0.5", True),
        ("ours, baseline", "Baseline, Ours", True),
        ("ours", "Baseline, Ours", False),
        ("y = 2x", "y=3x", False),
    ],
)
def test_text(said, answer, right):
    assert is_right(question("text", answer), f"Answer: {said}") is right


def test_nothing_said_is_wrong_and_no_reference_is_nobodys():
    assert is_right(question("text", "1"), "") is False
    assert is_right(question("text", None), "Answer: 1") is None
