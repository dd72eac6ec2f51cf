"""Conversations of data sets become messages to answer, each picture at its place."""

import re
from typing import Any

import pytest

from mmflash_jax.engine.conversations import split_conversation


def split(turns: list[Any], images: list[Any] | None = None) -> tuple[Any, Any]:
    return split_conversation(turns, images or [], "messages")


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


TEXT, PICTURE = {"type": "text", "text": "What?"}, {"type": "image"}


def test_what_follows_the_last_question_is_left_out():
    system, answer = (
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "A"},
    )
    turns = [system, user("Q"), answer, user("And?"), answer]
    assert split(turns) == (turns[:4], [])


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ({"type": "image", "image": "a.png"}, "a.png"),
        ({"type": "image", "url": "data:x", "image": None}, "data:x"),
        ({"type": "image", "image": {"bytes": b"x", "path": None}}, {"bytes": b"x", "path": None}),
        ({"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}}, "data:x"),
        ({"type": "image_url", "image_url": "b.png"}, "b.png"),
    ],
)
def test_a_part_that_names_its_picture(part, source):
    messages, images = split([user([part, TEXT])])
    assert messages == [user([PICTURE, TEXT])]
    assert images == [source]


def test_pictures_are_taken_in_order_or_by_index():
    own = {"type": "image", "path": "own"}
    assert split([user([PICTURE, own, PICTURE])], ["a", "b"])[1] == ["a", "own", "b"]
    turns = [user([{"type": "image", "index": 1}, {"type": "image", "index": 0}])]
    assert split(turns, ["a", "b"])[1] == ["b", "a"]


def test_llavas_spelling_and_marks_in_text():
    turns = [
        {"from": "human", "value": "<image>\nWhat?"},
        {"from": "gpt", "value": "A cat"},
        {"from": "human", "value": "Compare <image>"},
    ]
    messages, images = split(turns, ["a", "b"])
    assert messages == [
        user([PICTURE, {"type": "text", "text": "\nWhat?"}]),
        {"role": "assistant", "content": "A cat"},
        user([{"type": "text", "text": "Compare "}, PICTURE]),
    ]
    assert images == ["a", "b"]
    # Without pictures a mark is what somebody wrote.
    assert split([user("an <image> tag")]) == ([user("an <image> tag")], [])


def test_pictures_without_a_place_stand_before_the_first_question():
    messages, images = split([user("Q"), {"role": "assistant", "content": "A"}, user("R")], ["a"])
    assert messages[0] == user([PICTURE, {"type": "text", "text": "Q"}])
    assert messages[2] == user("R")
    assert images == ["a"]


BAD = {
    "no question": ([{"role": "assistant", "content": "A"}], [], "messages has no user turn"),
    "a word": (["Hi"], [], "messages[0] is 'Hi', expected a role and a content"),
    "no content": ([{"role": "user"}], [], "messages[0] has the fields ['role'], expected a role"),
    "a film": ([user([{"type": "video"}])], [], "messages[0].content[0] is of type 'video'; text"),
    "text without text": ([user([{"type": "text"}])], [], "is of type 'text'"),
    "too few": ([user([PICTURE, PICTURE])], ["a"], "asks for image 2, images holds 1"),
    "too many": ([user([PICTURE, TEXT])], ["a", "b"], "has places for 1 of the 2 in images"),
    "no such index": ([user([{"type": "image", "index": 3}])], ["a"], "asks for image 4"),
}


@pytest.mark.parametrize(("turns", "images", "message"), BAD.values(), ids=BAD.keys())
def test_what_is_no_conversation(turns, images, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        split(turns, images)
