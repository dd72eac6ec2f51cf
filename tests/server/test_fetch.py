"""Images by http(s) address: fetched from the internet only, within limits (B12)."""

import asyncio
import dataclasses
import http.server
import threading
from typing import Any, ClassVar

import pytest
from starlette.testclient import TestClient

from mmflash_jax.engine.images import ImageError
from mmflash_jax.server import fetch
from mmflash_jax.server.app import make_app
from mmflash_jax.server.fetch import Fetcher, is_public
from mmflash_jax.server.images import ImageLimits, read_image
from tests.server.conftest import CHARTS, data_url, message

CHART = CHARTS[0].read_bytes()
HOST = "pictures.example"


class Site(http.server.BaseHTTPRequestHandler):
    """What lies at each path: status, headers, content; a float is a pause in seconds."""

    pages: ClassVar[dict[str, tuple[int, dict[str, str], list[Any]]]] = {}
    asked: ClassVar[list[tuple[str, str]]] = []
    ended = threading.Event()

    def do_GET(self):
        self.asked.append((self.path, self.headers["Host"]))
        status, headers, content = self.pages[self.path]
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        try:
            for part in content:
                if isinstance(part, float):
                    self.ended.wait(part)
                else:
                    self.wfile.write(part)
        except (BrokenPipeError, ConnectionResetError):
            self.asked.append(("cut off", self.path))

    def log_message(self, format, *args):
        pass


@pytest.fixture(scope="module")
def port():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    Site.ended.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def names(monkeypatch):
    """The addresses of each name, one list a look-up; this machine's server counts as public."""
    known: dict[str, list[list[str]]] = {HOST: [["127.0.0.1"]]}
    looked_up: list[str] = []

    async def look_up(host, port):
        looked_up.append(host)
        if host not in known:
            return [host]
        answers = known[host]
        return answers.pop(0) if len(answers) > 1 else answers[0]

    monkeypatch.setattr(fetch, "look_up", look_up)
    monkeypatch.setattr(fetch, "is_public", lambda one: one == "127.0.0.1" or is_public(one))
    Site.asked.clear()
    known["looked up"] = [looked_up]
    return known


PNG = {"Content-Type": "image/png"}


def get(url, *, most_bytes=10**6, seconds=10.0):
    async def once():
        return await Fetcher(most_bytes=most_bytes, seconds=seconds).fetch(url, "image 1")

    return asyncio.run(once())


def refused(url, **options):
    with pytest.raises(ImageError, match=r"^image 1: ") as error:
        get(url, **options)
    return str(error.value)


def test_an_image_is_fetched_by_its_name(names, port):
    Site.pages["/a%20b.png?x=1"] = (200, PNG, [CHART])
    assert get(f"http://{HOST}:{port}/a%20b.png?x=1") == CHART
    assert Site.asked == [("/a%20b.png?x=1", f"{HOST}:{port}")]
    Site.pages["/plain"] = (200, {}, [CHART])
    assert get(f"http://{HOST}:{port}/plain") == CHART


def test_redirects_are_followed_a_few_times(names, port):
    for step in range(5):
        Site.pages[f"/{step}"] = (302, {"Location": f"/{step + 1}"}, [])
    Site.pages["/5"] = (200, PNG, [CHART])
    assert get(f"http://{HOST}:{port}/2") == CHART
    assert "more than 3 redirects" in refused(f"http://{HOST}:{port}/1")


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.1", "172.16.9.9", "192.168.1.1", "127.0.0.2", "0.0.0.0", "169.254.169.254",
        "100.64.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "::1", "::", "fe80::1",
        "fe80::1%lo", "fc00::1", "ff02::1", "::ffff:10.0.0.1", "::ffff:127.0.0.1",
        "2002:7f00:1::", "64:ff9b::a00:1", "2001:0:7f00:1::", "2001:db8::1",
    ],
)  # fmt: skip
def test_private_and_reserved_addresses_are_refused(monkeypatch, address):
    async def look_up(host, port):
        return [address]

    monkeypatch.setattr(fetch, "look_up", look_up)
    assert "private or reserved" in refused("http://inside.example/a.png")
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8"])
def test_public_addresses_are_not(address):
    assert is_public(address)


def test_one_private_address_among_public_ones_is_enough(names, port):
    names["mixed.example"] = [["127.0.0.1", "10.0.0.1"]]
    assert "private or reserved" in refused(f"http://mixed.example:{port}/plain")
    assert Site.asked == []


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "2130706433", "[::1]"])
def test_numbers_and_local_names_are_looked_up_like_others(address):
    """Without any patch: the system itself says where these are."""
    assert "private or reserved" in refused(f"http://{address}:1/a.png")


def test_a_redirect_into_the_own_network_is_refused(names, port):
    names["inside.example"] = [["10.0.0.1"]]
    for place, to in enumerate(("http://inside.example/", "http://127.0.0.2/", "file:///etc/x")):
        Site.pages[f"/to{place}"] = (307, {"Location": to}, [])
    assert "private or reserved" in refused(f"http://{HOST}:{port}/to0")
    assert "private or reserved" in refused(f"http://{HOST}:{port}/to1")
    assert "redirected to a 'file' address" in refused(f"http://{HOST}:{port}/to2")


def test_the_address_that_was_checked_is_the_one_that_is_asked(names, port):
    """A name that moves into the own network after the look-up (DNS rebinding)."""
    names[HOST] = [["127.0.0.1"], ["127.0.0.2"]]
    Site.pages["/moves"] = (200, PNG, [CHART])
    assert get(f"http://{HOST}:{port}/moves") == CHART
    assert names["looked up"][0] == [HOST], "looked up once"
    # The next fetch looks again.
    assert "private or reserved" in refused(f"http://{HOST}:{port}/moves")


def test_what_is_too_large_is_cut_off(names, port):
    endless = [bytes(10**5)] * 1000
    Site.pages["/endless"] = (200, PNG, endless)
    Site.pages["/says"] = (200, {**PNG, "Content-Length": "2000000"}, [b"x"])
    assert "more than the 1000000 bytes" in refused(f"http://{HOST}:{port}/endless")
    assert "2000000 bytes, at most 1000000" in refused(f"http://{HOST}:{port}/says")


def test_what_is_too_slow_is_given_up(names, port):
    Site.pages["/slow"] = (200, PNG, [b"x", 20.0])
    assert "not fetched within 0.3 s" in refused(f"http://{HOST}:{port}/slow", seconds=0.3)


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ((404, PNG, []), "its server answers 404"),
        ((200, {"Content-Type": "text/html"}, [b"<p>"]), "'text/html', expected an image"),
        ((200, {**PNG, "Content-Encoding": "gzip"}, [b"x"]), "compresses"),
        ((302, {"Location": "http://["}, []), "not a valid address"),
        ((200, {**PNG, "Content-Length": "9"}, [b"x"]), "cannot be fetched"),
    ],
)
def test_other_answers_are_refused(names, port, page, message):
    Site.pages["/other"] = page
    assert message in refused(f"http://{HOST}:{port}/other")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http:///a.png", "needs a host"),
        ("http://user:word@pictures.example/a.png", "no user or password"),
        ("http://pictures.example:99999/", "not a valid address"),
        ("http://127.0.0.1:1/a.png", "cannot be fetched"),
    ],
)
def test_what_cannot_be_asked_is_named(names, url, message):
    assert message in refused(url)


def test_it_is_off_unless_switched_on():
    with pytest.raises(ImageError, match=r"not fetched by this server \(--allow-http-images\)"):
        read_image(f"http://{HOST}/a.png", ImageLimits(), name="image 1")


def test_a_chat_about_a_fetched_image(served, names, port):
    """Through the routes: as from a data URL; a refusal is a 400 that names the image."""
    limits = dataclasses.replace(served.site.images, fetch_s=10.0)
    client = TestClient(make_app(dataclasses.replace(served.site, images=limits)))
    Site.pages["/chart.png"] = (200, PNG, [CHART])

    def answer(*images):
        body = {"model": "demo", "max_tokens": 30, "messages": [message("What?", *images)]}
        return client.post("/v1/chat/completions", json=body)

    url = f"http://{HOST}:{port}/chart.png"
    got, wanted = answer(url, url), answer(*[data_url(CHART)] * 2)
    assert got.status_code == 200, got.text
    assert got.json()["choices"] == wanted.json()["choices"]
    assert Site.asked == [("/chart.png", f"{HOST}:{port}")], "the same address once"
    bad = answer(url, "http://10.0.0.1/a.png")
    assert bad.status_code == 400
    assert bad.json()["error"]["message"].startswith("image 2: '10.0.0.1' is at a private")
    many = answer(*[url] * 4)
    assert (many.status_code, many.json()["error"]["message"]) == (400, "more than 3 images")
