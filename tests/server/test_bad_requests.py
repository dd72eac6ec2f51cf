"""Requests that cannot be answered: a 4xx with a readable reason, and the server lives on."""

import base64
import concurrent.futures
import dataclasses
import io
import json
import os
import urllib.error
import urllib.request
import warnings
from typing import Any

import httpx2
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from starlette.testclient import TestClient

from mmflash_jax.server.app import make_app
from tests.server.conftest import CHARTS, SAMPLES, data_url, message, wait_until

ONE_PIXEL = data_url(Image.new("RGB", (1, 1)))


def send(served, path: str, content: bytes | None) -> tuple[int, bytes]:
    """Status and body of the answer; no content makes it a GET."""
    request = urllib.request.Request(
        served.url + path, content, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def post(served, path: str, body: Any) -> tuple[int, Any]:
    """Status and JSON; a body of bytes is sent as it stands."""
    status, content = send(
        served, path, body if isinstance(body, bytes) else json.dumps(body).encode()
    )
    return status, json.loads(content)


def refused(served, status: int = 400, path: str = "/v1/chat/completions", **body: Any) -> str:
    """The message of a refusal; the default body is a good chat."""
    whole = {"model": "demo", "messages": [message("Hi")], "max_tokens": 4, **body}
    got, answer = post(served, path, whole)
    assert (got, set(answer)) == (status, {"error"}), answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in answer["error"]["message"]
    return answer["error"]["message"]


def test_the_client_raises_its_own_errors(served):
    with pytest.raises(openai.NotFoundError, match="'other' is not served here"):
        served.client.chat.completions.create(model="other", messages=[message("Hi")])
    with pytest.raises(openai.BadRequestError, match="temperature"):
        served.chat("Hi", temperature=-1)
    with pytest.raises(openai.BadRequestError) as caught:
        served.chat("Hi", max_tokens=4000)
    assert caught.value.code == "context_length_exceeded"
    assert "4000 more" in str(caught.value)
    assert "448" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        # C12: no grammar is half there.
        ("response_format", {"type": "json_object"}),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("audio", {"voice": "a"}),
        ("best_of", 3),
        ("ignore_eos", True),
        ("min_tokens", 5),
        ("skip_special_tokens", False),
        ("guided_json", {}),
        ("no_such_field", 1),
    ],
)
def test_what_is_not_supported_is_named(served, name, value):
    text = refused(served, **{name: value})
    assert name in text
    assert "not supported" in text


def test_values_that_ask_for_nothing_are_fine(served):
    body = {"response_format": {"type": "text"}, "tools": [], "best_of": 1, "user": "me"}
    status, _ = post(
        served,
        "/v1/chat/completions",
        {"model": "demo", "messages": [message("Hi")], "max_tokens": 2, **body},
    )
    assert status == 200


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"seed": 2**64}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 100}, "stop"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"704": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1000}}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": None}, "messages"),
    ],
)
def test_values_out_of_range_are_named(served, body, named):
    assert named in refused(served, **body)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": "  \n"}],
        [{"role": "user", "content": None}],
        [{"role": "user"}],
        [{"role": "user", "content": "\ud800"}],
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
        [{"role": "user", "content": [{"type": "image"}]}],
        [{"content": "no role"}],
        ["text"],
    ],
)
def test_messages_without_something_to_answer(served, messages):
    """C11: 400, never 500."""
    refused(served, messages=messages)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": ""}, {"role": "user", "content": "Hi"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": ONE_PIXEL}}]}],
    ],
)
def test_an_empty_system_message_and_an_image_alone_are_answered(served, messages):
    """C11, B09."""
    got = served.client.chat.completions.create(model="demo", messages=messages, max_tokens=2)
    assert got.usage.completion_tokens <= 2


def png(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


HUGE = png(Image.new("1", (20000, 20000)))
PHOTO = png(Image.effect_noise((64, 48), 80).convert("RGB"), "JPEG")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        (data_url(PHOTO[: len(PHOTO) // 2]), "cannot be decoded"),
        (data_url(b"no image"), "not a readable"),
        (data_url(b""), "empty"),
        ("data:image/png;base64,@@@@", "base64"),
        ("data:image/png;base64" + base64.b64encode(PHOTO).decode(), "must read data:image"),
        ("data:image/png,abc", "must read data:image"),
        (data_url(HUGE), "67108864 pixels allowed"),
        (data_url(bytes(300_000)), "at most 262144"),
        ("http://127.0.0.1:1/a.png", "not fetched"),
        ("https://example.com/a.png", "not fetched"),
        ("ftp://example.com/a.png", "'ftp' addresses are not supported"),
        ("file:///etc/passwd", "no such file under the allowed folder"),
        ("not/base64.png", "base64"),
    ],
)
def test_images_that_cannot_be_taken(served, url, reason):
    """B10, B11: the reason in words, and the next request is answered."""
    text = refused(served, messages=[message("What?", url)])
    assert reason in text
    assert "image 1" in text
    assert served.chat("Hi", max_tokens=1).usage.completion_tokens == 1


def test_files_are_read_under_the_allowed_folder_only(served):
    root = served.site.images.root
    same = served.chat("What?", CHARTS[0], max_tokens=8).choices[0].message.content
    got = served.chat("What?", f"file://{root}/chart.png", max_tokens=8)
    assert got.choices[0].message.content == same
    link = root / "link.png"
    if not link.exists():
        link.symlink_to(CHARTS[1])
    for name in ("link.png", "../chart.png", "missing.png", "%00", ""):
        text = refused(served, messages=[message("What?", f"file://{root}/{name}")])
        assert "no such file under the allowed folder" in text


def test_too_many_images_and_placeholders_in_text(served):
    """B06: counts are named."""
    text = refused(served, messages=[message("What?", *[ONE_PIXEL] * 4)])
    assert "more than 3 images" in text
    pad = served.session.encoder.tokenizer.decode(
        [served.session.plan.target.config.image_token_id]
    )
    assert "image" in refused(served, messages=[message(f"What? {pad}", ONE_PIXEL)])


def test_bodies_that_are_no_request(served):
    for body in (b"{", b"", b"[]", b"3", b"\xff\xfe", b'"x"', b"[" * 100_000):
        status, answer = post(served, "/v1/chat/completions", body)
        assert status == 400
        assert answer["error"]["type"] == "invalid_request_error"
    assert post(served, "/v1/chat/completions", b" " * 3_000_000)[0] == 413
    assert post(served, "/v1/nothing", {})[0] == 404
    status, content = send(served, "/v1/chat/completions", None)
    assert status == 405
    assert json.loads(content)["error"]["type"] == "invalid_request_error"


def test_an_api_key_is_asked_for(served):
    """Of the API alone: health and metrics stay open."""
    app = make_app(dataclasses.replace(served.site, api_key="secret"))
    # Not entered: this second front must not start the engine again.
    client = TestClient(app)
    wrong = {}, {"Authorization": "Bearer no"}, {"Authorization": "Bearer secret2"}
    for headers in wrong:
        answer = client.get("/v1/models", headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
    assert client.get("/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200
    assert client.get("/health").status_code == 200
    assert client.get("/metrics").status_code == 200


def test_a_full_queue_asks_to_come_back(served):
    """More than rows and queue hold: 503 with Retry-After for some, answers for the others."""
    body = {"model": "demo", "messages": [message("Hi")], "max_tokens": 16, "temperature": 3.0}

    def ask(_: int) -> tuple[int, str | None]:
        with httpx2.Client(timeout=120) as client:
            got = client.post(f"{served.url}/v1/chat/completions", json={**body, "n": 10})
            return got.status_code, got.headers.get("retry-after")

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, range(12)))
    assert {status for status, _ in answers} == {200, 503}
    assert all((status == 503) == (retry is not None) for status, retry in answers)
    wait_until(served.idle)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
PART = st.one_of(
    st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=12) | JSON}),
    st.fixed_dictionaries(
        {
            "type": st.just("image_url"),
            "image_url": st.fixed_dictionaries(
                {
                    "url": st.sampled_from([ONE_PIXEL, "data:,", "data:;base64,"])
                    | st.text(max_size=9)
                }
            ),
        }
    ),
    JSON,
)
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "system", "assistant", "tool"]) | JSON,
        "content": st.text(max_size=12) | st.lists(PART, max_size=3) | JSON,
    }
)
NUMBER = st.integers(-3, 5) | st.floats(-3, 3) | JSON
FIELDS = {
    "max_tokens": st.integers(1, 4) | JSON,
    "temperature": NUMBER,
    "top_p": NUMBER,
    "top_k": NUMBER,
    "min_p": NUMBER,
    "seed": st.integers(0, 9) | JSON,
    "n": st.integers(1, 3) | JSON,
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3) | JSON,
    "stop_token_ids": st.lists(st.integers(0, 800), max_size=3) | JSON,
    "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "repetition_penalty": NUMBER,
    "logit_bias": st.dictionaries(st.integers(0, 800).map(str), NUMBER, max_size=3) | JSON,
    "logprobs": st.booleans() | NUMBER,
    "stream": st.booleans() | JSON,
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}) | JSON,
    "echo": JSON,
    "tools": JSON,
    "user": JSON,
}
CHAT = st.fixed_dictionaries(
    {"model": st.just("demo"), "messages": st.lists(MESSAGE, max_size=3) | JSON},
    optional={**FIELDS, "top_logprobs": NUMBER},
)
TEXT = st.fixed_dictionaries(
    {
        "model": st.just("demo"),
        "prompt": st.text(max_size=12)
        | st.lists(st.integers(-1, 800), max_size=4)
        | st.lists(st.text(max_size=4), max_size=3)
        | JSON,
    },
    optional=FIELDS,
)
# The long form: FUZZ_EXAMPLES=20000.
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "60"))


@pytest.mark.parametrize(("path", "bodies"), [("chat/completions", CHAT), ("completions", TEXT)])
def test_no_body_makes_a_server_error(served, path, bodies):
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=EXAMPLES == 60,
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much),
    )
    @given(body=bodies)
    def attack(body):
        # A limit keeps good bodies short.
        body = {"max_tokens": 3, **body}
        status, content = send(served, f"/v1/{path}", json.dumps(body).encode())
        assert status in (200, 400, 404), content
        if status != 200:
            assert json.loads(content)["error"]["message"]
        else:
            assert b'"error"' not in content

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attack()
    wait_until(served.idle)
    assert served.site.engine.stuck(60) is None
    assert len(list(SAMPLES.glob("*.png"))) == len(CHARTS)
