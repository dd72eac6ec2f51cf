"""The page at `/` in a real headless browser, against the running server."""

import shutil

import pytest

from tests.server.conftest import CHARTS, wait_until

playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
QUESTION = "Which country has the highest value?"

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason=f"no browser on the path ({', '.join(BROWSERS)}); .ci/run installs one"
)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        # A container's root has no sandbox to start it in.
        options = {"executable_path": BROWSER, "args": ["--no-sandbox"]}
        browser = driver.chromium.launch(**options)
        yield browser
        browser.close()


@pytest.fixture
def page(browser, served):
    page = browser.new_page(viewport={"width": 900, "height": 1000})
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
    page.goto(served.url)
    yield page
    page.close()
    # The browser notes every refused request, also one that the page shows.
    assert [one for one in complaints if "status of 400" not in one] == []


def ask(page, *, image=True, tokens=100):
    """Fill the form and send it; every state of the answer is noted while it streams."""
    if image:
        page.set_input_files("#file", CHARTS[0])
        page.wait_for_function("document.getElementById('preview').naturalWidth > 0")
    page.fill("#question", QUESTION)
    page.fill("#tokens", str(tokens))
    page.evaluate(
        """() => {
            const text = id => document.getElementById(id).textContent;
            window.seen = [];
            new MutationObserver(() => window.seen.push(
                [document.getElementById("answer").childNodes.length, text("tau"), text("speed")]
            )).observe(document.body, {subtree: true, childList: true, characterData: true});
        }"""
    )
    page.click("#send")
    page.wait_for_function("!document.getElementById('send').disabled", timeout=60_000)


def test_an_answer_about_an_image_streams_with_coloured_drafts(page, served, tmp_path):
    wanted = served.chat(QUESTION, CHARTS[0])
    ask(page)
    assert page.inner_text("#answer") == wanted.choices[0].message.content
    marks = page.evaluate(
        """() => [...document.querySelectorAll("#answer > *")].map(node =>
            [node.tagName, node.className, getComputedStyle(node).backgroundColor])"""
    )
    details = wanted.usage.completion_tokens_details
    drafts = [mark for mark in marks if mark[0] == "SPAN"]
    own = [mark for mark in marks if mark[0] == "I"]
    assert len(marks) == wanted.usage.completion_tokens
    assert len(drafts) == details.accepted_prediction_tokens > len(own)

    # Drafts of a step share a colour; the next step, behind a token of the target's own, has the
    # other one.
    colours = {mark[1]: mark[2] for mark in drafts}
    assert len(set(colours.values())) == len(colours) == 2
    assert "rgba(0, 0, 0, 0)" not in colours.values()
    step = 0
    for tag, name, _ in marks:
        if tag == "I":
            step += 1
        else:
            assert name == "ba"[step % 2]

    # Figures: what the answer says, and they moved while it came.
    steps = len(own) - 1
    assert page.inner_text("#count") == str(len(marks))
    assert float(page.inner_text("#tau")) == pytest.approx((len(marks) - 1) / steps, abs=0.06)
    assert int(page.inner_text("#speed")) > 0
    seen = page.evaluate("window.seen")
    partly = [(tau, speed) for length, tau, speed in seen if 0 < length < len(marks)]
    assert any(tau[0].isdigit() for tau, _ in partly), "it came in parts, tau with them"
    assert any(speed.isdigit() for *_, speed in seen)
    picture = tmp_path / "page.png"
    page.screenshot(path=picture)
    assert picture.stat().st_size > 10_000


def test_a_refusal_is_shown(page):
    with page.expect_response("**/v1/chat/completions") as answer:
        ask(page, image=False, tokens=100_000)
    assert answer.value.status == 400
    shown = page.inner_text("#answer .error")
    assert "a row holds 448" in shown


def test_stop_ends_the_request(page, served):
    page.fill("#question", QUESTION)
    page.set_input_files("#file", CHARTS[0])
    page.fill("#temperature", "3")
    page.fill("#tokens", "300")
    page.click("#send")
    page.wait_for_function("Number(document.getElementById('count').textContent) > 4")
    page.click("#stop")
    page.wait_for_function("!document.getElementById('send').disabled")
    assert page.query_selector("#answer .error") is None
    wait_until(served.idle)
