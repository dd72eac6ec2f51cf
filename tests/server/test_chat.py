"""The real openai client against the real server."""

import concurrent.futures
import dataclasses
import json
import math
import urllib.request

import pytest

from mmflash_jax.compilation import compiled_programs
from mmflash_jax.config import SamplingSettings
from mmflash_jax.decode.adjust import Adjustment
from mmflash_jax.engine.prompts import Request
from tests.server.conftest import CHARTS, SAMPLES, message, wait_until

QUESTION = "Which country is highest?"
LINES = [json.loads(line) for line in (SAMPLES / "prompts.jsonl").read_text().splitlines()]


def prompt_of(served, text, *images, **fields):
    return served.session.encoder.encode(
        Request(text=text, images=images, **{"max_tokens": 100, **fields})
    )


def test_models(served):
    assert [model.id for model in served.client.models.list()] == ["demo"]
    assert served.client.models.retrieve("demo").id == "demo"


def test_an_image_question_is_answered_as_by_the_library(served):
    """B01, B04: the same ids as plain decoding of the same prompt; image tokens are counted."""
    prompt = prompt_of(served, QUESTION, CHARTS[0])
    (ids,) = served.plain([prompt])
    got = served.chat(QUESTION, CHARTS[0])
    (choice,) = got.choices
    assert choice.message.content == served.session.encoder.decode(ids)
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert got.usage.completion_tokens == len(ids)
    assert got.usage.prompt_tokens == len(prompt.ids)
    assert got.usage.total_tokens == len(prompt.ids) + len(ids)
    details = got.usage.prompt_tokens_details
    assert details.image_tokens == prompt.images[0].num_tokens > 0
    # The demo's draft foresees most of the answer.
    assert got.usage.completion_tokens_details.accepted_prediction_tokens > len(ids) / 2


def test_a_prompt_asked_twice_is_computed_twice(served):
    """C02, C03: there is no prefix cache that drafting could switch off or spoil."""
    cold, warm = (served.chat(QUESTION, CHARTS[2]) for _ in range(2))
    assert warm.usage == cold.usage
    assert warm.usage.prompt_tokens_details.cached_tokens == 0
    assert warm.choices[0].message.content == cold.choices[0].message.content


def test_an_image_more_each_turn(served):
    """C04: every turn is right, and no hit is claimed."""
    sent, known = [], []
    for count, chart in enumerate(CHARTS[:3], start=1):
        sent.append(message("What is it?", chart))
        known.append(
            {
                "role": "user",
                "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}],
            }
        )
        request = Request(messages=list(known), images=CHARTS[:count], max_tokens=12)
        (ids,) = served.plain([served.session.encoder.encode(request)])
        got = served.client.chat.completions.create(model="demo", messages=sent, max_tokens=12)
        answer = got.choices[0].message.content
        assert answer == served.session.encoder.decode(ids)
        assert got.usage.prompt_tokens_details.cached_tokens == 0
        for turns in (sent, known):
            turns.append({"role": "assistant", "content": answer})


def test_a_stream_adds_up_to_the_whole_answer(served):
    whole = served.chat(QUESTION, CHARTS[1])
    chunks = list(
        served.chat(QUESTION, CHARTS[1], stream=True, stream_options={"include_usage": True})
    )
    *parts, last = chunks
    assert last.choices == []
    assert last.usage == whole.usage
    assert all(part.usage is None for part in parts)
    assert {part.id for part in chunks} == {last.id}
    assert parts[0].choices[0].delta.role == "assistant"
    deltas = [part.choices[0].delta.content or "" for part in parts]
    assert "".join(deltas) == whole.choices[0].message.content
    assert sum(bool(delta) for delta in deltas) > 1
    assert [part.choices[0].finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1].choices[0].finish_reason == "stop"


def test_stop_strings(served):
    """A04: the text ends before the string, in a stream and without; tokens up to it count."""
    full = served.chat(QUESTION, CHARTS[0]).choices[0].message.content
    stop = full[20:26]
    assert full.index(stop) == 20
    got = served.chat(QUESTION, CHARTS[0], stop=["nowhere", stop])
    assert got.choices[0].message.content == full[:20]
    assert got.choices[0].finish_reason == "stop"
    stream = served.chat(QUESTION, CHARTS[0], stop=stop, stream=True)
    seen = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(seen) == full[:20]
    wait_until(served.idle)


def test_stop_token_ids_and_limits(served):
    """A01, A02, A03: nothing after a stop id; exactly as many tokens as allowed."""
    prompt = prompt_of(served, QUESTION, CHARTS[0])
    (ids,) = served.plain([prompt])
    place = next(i for i, id in enumerate(ids) if id not in ids[:i] and i >= 2)
    got = served.chat(QUESTION, CHARTS[0], extra_body={"stop_token_ids": [ids[place]]})
    assert got.usage.completion_tokens == place + 1
    assert got.choices[0].finish_reason == "stop"
    for limit in (1, 2, 7):
        got = served.chat(QUESTION, CHARTS[0], max_completion_tokens=limit)
        assert got.usage.completion_tokens == limit
        assert got.choices[0].finish_reason == "length"
        assert got.choices[0].message.content == served.session.encoder.decode(ids[:limit])


def test_several_choices_draw_apart_and_repeat_with_their_seed(served):
    """A08: unseeded answers differ, seeded ones are the same alone and among others."""
    fields = {"temperature": 2.0, "max_tokens": 12}
    free = served.chat(QUESTION, CHARTS[0], n=4, **fields)
    assert [choice.index for choice in free.choices] == [0, 1, 2, 3]
    assert len({choice.message.content for choice in free.choices}) > 1
    three = served.chat(QUESTION, CHARTS[0], n=3, seed=7, **fields)
    alone = [served.chat(QUESTION, CHARTS[0], seed=seed, **fields) for seed in (7, 8, 9)]
    assert [c.message.content for c in three.choices] == [
        one.choices[0].message.content for one in alone
    ]
    assert three.usage.completion_tokens == sum(one.usage.completion_tokens for one in alone)
    assert three.usage.prompt_tokens == alone[0].usage.prompt_tokens


def test_filters_that_leave_one_token_are_greedy(served):
    """A07: with drafting on."""
    greedy = served.chat(QUESTION, CHARTS[0]).choices[0].message.content
    one = served.chat(QUESTION, CHARTS[0], temperature=1.5, extra_body={"top_k": 1})
    assert one.choices[0].message.content == greedy
    tiny = served.chat(QUESTION, CHARTS[0], temperature=1.5, top_p=1e-6)
    assert tiny.choices[0].message.content == greedy


def test_logprobs(served):
    got = served.chat(QUESTION, CHARTS[0], logprobs=True, top_logprobs=3)
    content = got.choices[0].logprobs.content
    assert len(content) == got.usage.completion_tokens
    assert "".join(entry.token for entry in content) == got.choices[0].message.content
    for entry in content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob, abs=1e-6)
        assert entry.bytes == list(entry.token.encode())
    streamed = served.chat(QUESTION, CHARTS[0], logprobs=True, top_logprobs=3, stream=True)
    parts = [chunk.choices[0].logprobs for chunk in streamed]
    again = [entry for part in parts if part for entry in part.content]
    assert [entry.token for entry in again] == [entry.token for entry in content]
    for one, two in zip(again, content, strict=True):
        assert math.isclose(one.logprob, two.logprob, abs_tol=1e-4)


def test_a_bias_forbids_and_forces(served):
    encoder = served.session.encoder
    (ids,) = served.plain([prompt_of(served, QUESTION, CHARTS[0])])
    got = served.chat(QUESTION, CHARTS[0], max_tokens=8, logit_bias={str(ids[0]): -100})
    assert got.choices[0].message.content != encoder.decode(ids[:8])
    forced = served.chat(QUESTION, CHARTS[0], max_tokens=6, logit_bias={str(ids[3]): 100})
    assert forced.choices[0].message.content == encoder.decode([ids[3]] * 6)


def test_text_completions(served):
    encoder = served.session.encoder
    rendered = encoder.render(Request(text="Hello"))
    chat = served.chat("Hello", max_tokens=8).choices[0].message.content
    ids = encoder.tokenizer(rendered)["input_ids"]
    for prompt in (rendered, ids, [rendered], [ids]):
        got = served.client.completions.create(
            model="demo", prompt=prompt, max_tokens=8, logprobs=2
        )
        assert got.choices[0].text == chat
        assert len(got.choices[0].logprobs.tokens) == got.usage.completion_tokens
        assert got.choices[0].logprobs.text_offset[0] == 0
    two = served.client.completions.create(
        model="demo", prompt=[rendered, rendered], max_tokens=8, n=2
    )
    assert [choice.index for choice in two.choices] == [0, 1, 2, 3]
    assert {choice.text for choice in two.choices} == {chat}
    assert two.usage.prompt_tokens == 2 * len(ids)
    stream = served.client.completions.create(
        model="demo", prompt=rendered, max_tokens=8, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == chat


# Enough for rows to come and go many times: an answer takes a few steps of drafts.
MOST = 40
SETTINGS = [
    {},
    {"temperature": 0.8, "seed": 11},
    {"temperature": 1.3, "seed": 2**40, "top_p": 0.9},
    {"presence_penalty": 1.2, "frequency_penalty": 0.7},
    {"temperature": 1.0, "seed": 5, "extra_body": {"repetition_penalty": 1.4, "min_p": 0.02}},
]


def as_prompt(served, line, settings):
    flat = {**settings, **settings.get("extra_body", {})}
    sampling = {n: flat[n] for n in ("temperature", "seed", "top_p", "min_p") if n in flat}
    penalties = {name: value for name, value in flat.items() if name.endswith("_penalty")}
    images = [SAMPLES / name for name in line["images"]]
    prompt = prompt_of(served, line["text"], *images, max_tokens=MOST)
    return dataclasses.replace(
        prompt, sampling=SamplingSettings(**sampling), adjustment=Adjustment(**penalties)
    )


def test_thirty_two_clients_at_once_each_get_their_own_answer(served):
    """A09, A10, A13, PARITY: ids of cold plain decoding for each request under load; C13: no
    program is compiled."""
    cases = [(LINES[n % len(LINES)], SETTINGS[n % len(SETTINGS)]) for n in range(32)]
    wanted = served.plain([as_prompt(served, *case) for case in cases])
    before = compiled_programs()

    def ask(case):
        line, settings = case
        images = [SAMPLES / name for name in line["images"]]
        return served.chat(line["text"], *images, max_tokens=MOST, **settings)

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(ask, cases))
    for got, ids in zip(answers, wanted, strict=True):
        assert got.choices[0].message.content == served.session.encoder.decode(ids)
        assert got.usage.completion_tokens == len(ids)
    assert len({got.choices[0].message.content for got in answers}) > len(LINES)
    wait_until(served.idle)
    assert compiled_programs() == before


def test_connections_that_drop_free_their_slots(served):
    """C09: streams dropped in the middle, and answers after them that are right."""
    (ids,) = served.plain([prompt_of(served, QUESTION, CHARTS[0], max_tokens=30)])
    # Twice as many as there are rows.
    for _ in range(8):
        stream = served.chat(QUESTION, CHARTS[0], max_tokens=300, temperature=3.0, stream=True)
        next(iter(stream))
        stream.close()
        got = served.chat(QUESTION, CHARTS[0], max_tokens=30)
        assert got.choices[0].message.content == served.session.encoder.decode(ids)
    wait_until(served.idle)


def test_metrics_and_health(served):
    served.chat(QUESTION, CHARTS[0])
    # An answer is out a moment before its slot is free.
    wait_until(served.idle)
    with urllib.request.urlopen(f"{served.url}/health") as answer:
        assert json.load(answer) == {"status": "ok"}
    with urllib.request.urlopen(f"{served.url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert float(values['mmflash_requests_finished_total{reason="stop"}']) >= 1
    assert float(values["mmflash_time_to_first_token_seconds_count"]) >= 1
    assert float(values["mmflash_inter_token_latency_seconds_count"]) >= 1
    kept = float(values["mmflash_spec_decode_num_accepted_tokens_total"])
    by_place = [
        float(values[f'mmflash_spec_decode_num_accepted_tokens_per_pos_total{{position="{n}"}}'])
        for n in range(15)
    ]
    assert sum(by_place) == kept > 0
    assert by_place == sorted(by_place, reverse=True)
    assert float(values["mmflash_requests_running"]) == 0


def test_the_page_and_what_it_reads(served):
    """Which tokens were drafted: their texts add up, and steps are those that usage counts."""
    with urllib.request.urlopen(served.url) as answer:
        page = answer.read().decode()
    assert "return_drafted" in page
    stream = served.chat(
        QUESTION,
        CHARTS[0],
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_drafted": True},
    )
    *chunks, last = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    extra = [chunk.choices[0].model_extra or {} for chunk in chunks]
    parts = [tuple(part) for one in extra for part in one.get("drafted", ())]
    assert "".join(shown for shown, _ in parts) == text
    assert len(parts) == last.usage.completion_tokens
    kept = sum(drafted for _, drafted in parts)
    assert kept == last.usage.completion_tokens_details.accepted_prediction_tokens > 0


def test_a_chat_of_several_turns(served):
    """C05, C11: more images each turn, and an assistant's turn between."""
    turns = [message("One?", CHARTS[0])]
    for chart in CHARTS[1:3]:
        got = served.client.chat.completions.create(model="demo", messages=turns, max_tokens=6)
        turns.append({"role": "assistant", "content": got.choices[0].message.content})
        turns.append(message("And this one?", chart))
    got = served.client.chat.completions.create(model="demo", messages=turns, max_tokens=6)
    images = [served.session.encoder.encode(Request(text="x", images=(c,))) for c in CHARTS[:3]]
    counted = sum(prompt.images[0].num_tokens for prompt in images)
    assert got.usage.prompt_tokens_details.image_tokens == counted
