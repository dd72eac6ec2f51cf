"""Requests that join and leave a running batch get the answers they would get alone."""

import collections
import dataclasses
import functools
import threading
import time
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from mmflash_jax.compilation import compiled_programs
from mmflash_jax.config import SamplingSettings
from mmflash_jax.decode.adjust import Adjustment
from mmflash_jax.decode.records import Plan, Prompt
from mmflash_jax.decode.slots import Shape
from mmflash_jax.drafters import NoDraft
from mmflash_jax.engine.offline import answer
from mmflash_jax.engine.serving import SHORT_RUN, Engine
from mmflash_jax.engine.tickets import BusyError, RefusedError, Update
from mmflash_jax.load import load_target
from tests import tiny
from tests.drafts import draft_for, random_params, two_layer_target
from tests.targets.prompts import make_prompt

# Few rows and several widths, so that requests meet every program while they run.
PACES = ((1, 4), (3, 1), (3, 2), (3, 4))
SHAPE = Shape(slots=3, capacity=128, steps=2, widths=(16, 32), image_sizes=(64, 128), paces=PACES)
SAMPLED = SamplingSettings(temperature=1.0, top_p=0.95, seed=2**40 + 7)
PENALISED = Adjustment(
    presence_penalty=0.8, frequency_penalty=0.6, repetition_penalty=1.3, logit_bias=((65, 4.0),)
)
# Text of one and of several chunks, images across chunk edges, all kinds of settings.
KINDS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((5,), {}),
    ((90,), {"max_tokens": 30}),
    ((3, (4, 6), 4), {"sampling": SAMPLED}),
    ((1, (8, 10), 2, (4, 4), 30), {}),
    ((20,), {"adjustment": PENALISED, "sampling": SAMPLED}),
    ((33,), {"adjustment": PENALISED}),
    ((2,), {"max_tokens": 1}),
    ((17, (4, 4)), {"sampling": dataclasses.replace(SAMPLED, top_k=5, top_p=1.0, seed=9)}),
    ((64,), {"logprobs": True}),
    ((12,), {"max_tokens": 2, "sampling": SAMPLED}),
]


class Setup(NamedTuple):
    plan: Plan
    params: dict[str, Any]
    prompts: list[Prompt]
    plain: list[tuple[int, ...]]


class Inbox:
    """Collects the updates of one request."""

    def __init__(self):
        self.updates: list[Update] = []
        self.ended = threading.Event()

    def __call__(self, update: Update) -> None:
        assert not self.ended.is_set(), "an update after the last"
        self.updates.append(update)
        if update.finish_reason is not None:
            self.ended.set()

    def wait(self) -> "Inbox":
        assert self.ended.wait(120)
        return self

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(id for update in self.updates for id in update.ids)

    @property
    def reason(self) -> str | None:
        return self.updates[-1].finish_reason


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    folder = two_layer_target(tmp_path_factory.mktemp("target"))
    target, target_params = load_target(folder, "float32")
    drafter = draft_for(folder, block_size=4)
    prompts = [
        dataclasses.replace(
            make_prompt(target, *parts, seed=seed, max_tokens=24),
            **changes,
        )
        for seed, (parts, changes) in enumerate(KINDS)
    ]
    stop = (tiny.TOKEN_IDS["<|im_end|>"],)
    params = {"target": target_params, "drafter": random_params(drafter)}
    plain = answer(Plan(target, NoDraft(), stop), params, prompts, batch=len(prompts))
    ids = [completion.token_ids for completion in plain.completions]
    return Setup(Plan(target, drafter, stop), params, prompts, ids)


@pytest.fixture(scope="module")
def engine(setup: Setup):
    engine = Engine(setup.plan, setup.params, SHAPE, queue=40)
    names: collections.Counter[str] = collections.Counter()

    def count(event: str, duration_secs: float, **details: Any) -> None:
        names[details.get("fun_name", "")] += event.endswith("backend_compile_duration")

    jax.monitoring.register_event_duration_secs_listener(count)
    engine.warm_up(setup.prompts[2].images[0])
    jax.monitoring.unregister_event_duration_listener(count)
    # What is compiled side by side is found by the calls that follow.
    assert names["jit(run)"] == len(PACES)
    assert names["jit(prefill_chunk)"] == len(SHAPE.widths)
    assert names["jit(encode_image_batch)"] == len(SHAPE.image_sizes)
    engine.start()
    yield engine
    engine.stop(patience_s=60)


def wait_until(holds) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_every_answer_is_that_of_plain_decoding_alone(setup, engine):
    """A08, A09, A10, A13, A20, B15: thirty requests over three slots, joining at any time."""
    order = np.random.default_rng(0).permutation(3 * len(setup.prompts)) % len(setup.prompts)
    before = compiled_programs()
    inboxes = [Inbox() for _ in order]
    for number, inbox in zip(order, inboxes, strict=True):
        engine.submit(setup.prompts[number], inbox)
    for number, inbox in zip(order, inboxes, strict=True):
        assert inbox.wait().ids == setup.plain[number]
        prompt = setup.prompts[number]
        last = inbox.updates[-1]
        assert sum(last.committed) == last.steps
        assert np.dot(last.committed, 1 + np.arange(4)) == len(inbox.ids) - 1
        stopped = inbox.ids[-1] in setup.plan.stop_ids
        assert inbox.reason == ("stop" if stopped else "length")
        assert stopped or len(inbox.ids) == prompt.max_tokens
    wait_until(lambda: engine.occupied == 0)
    # C13: everything was compiled in the warm-up.
    assert compiled_programs() == before
    # C14: every width was tried, the loop went on with one of them.
    metrics = engine.metrics.registry
    for width in (1, 2, 4):
        name = "mmflash_steps_by_draft_width_total"
        assert metrics.get_sample_value(name, {"width": str(width)}) > 0


def test_penalties_change_the_answer(setup):
    """The equality above would hold for penalties that do nothing."""
    plain = Plan(setup.plan.target, NoDraft(), setup.plan.stop_ids)
    without = [
        dataclasses.replace(setup.prompts[number], adjustment=Adjustment()) for number in (4, 5)
    ]
    ids = [c.token_ids for c in answer(plain, setup.params, without, batch=2).completions]
    assert ids[0] != setup.plain[4]
    assert ids[1] != setup.plain[5]


def test_logprobs_are_the_targets_own(setup, engine):
    inbox = Inbox()
    engine.submit(setup.prompts[8], inbox)
    inbox.wait()
    noted = [one for update in inbox.updates for one in update.logprobs]
    assert len(noted) == len(inbox.ids) > 1
    for id, one in zip(inbox.ids, noted, strict=True):
        # Greedy: the chosen token is the likeliest.
        assert one.ids[0] == id
        assert one.values[0] == pytest.approx(one.chosen, abs=1e-6)
        assert (np.diff(one.values) <= 0).all()
        assert np.exp(one.values).sum() < 1
        assert len(set(one.ids.tolist())) == 20


def test_cancelled_requests_leave_queue_prefill_and_slots(setup, engine):
    """C09: fifty cancellations at any moment leave no slot behind and disturb nobody."""
    random = np.random.default_rng(1)
    kept = []
    for turn in range(50):
        number = int(random.integers(len(setup.prompts)))
        dropped = Inbox()
        ticket = engine.submit(setup.prompts[1], dropped)
        if turn % 5 == 0:
            kept.append((number, Inbox()))
            engine.submit(setup.prompts[number], kept[-1][1])
        time.sleep(float(random.uniform(0, 0.02)))
        engine.cancel(ticket)
    for number, inbox in kept:
        assert inbox.wait().ids == setup.plain[number]
    wait_until(lambda: engine.occupied == engine.waiting == 0)


def test_what_can_never_fit_is_refused_with_the_numbers(setup, engine):
    long = dataclasses.replace(setup.prompts[1], max_tokens=39)
    with pytest.raises(RefusedError, match=r"90 tokens.* 39 more.*129 in all; a row holds 128"):
        engine.submit(long, Inbox())
    image = setup.prompts[2].images[0]
    large = dataclasses.replace(image, patches=np.zeros((129, image.patches.shape[1])))
    with pytest.raises(RefusedError, match="image 1 has 129 patches, at most 128"):
        engine.submit(dataclasses.replace(setup.prompts[2], images=(large,)), Inbox())


def test_a_full_row_is_served_to_its_end(setup, engine):
    """A03, A17: the last token needs no slot in the cache."""
    full = dataclasses.replace(setup.prompts[1], max_tokens=38)
    inbox = Inbox()
    engine.submit(full, inbox)
    ids = inbox.wait().ids
    assert ids[:30] == setup.plain[1]
    assert len(ids) == 38 or inbox.reason == "stop"


def test_the_queue_is_bounded_and_a_stopped_engine_reports(setup):
    engine = Engine(setup.plan, setup.params, SHAPE, queue=4)
    inboxes = [Inbox() for _ in range(4)]
    for inbox in inboxes:
        engine.submit(setup.prompts[1], inbox)
    with pytest.raises(BusyError, match="4 requests wait"):
        engine.submit(setup.prompts[0], Inbox())
    assert engine.stuck(1) == "the engine is not running"
    engine.start()
    engine.stop(patience_s=0)
    for inbox in inboxes:
        inbox.wait()
        if inbox.reason == "error":
            assert inbox.updates[-1].error == "the server is shutting down"
    assert any(inbox.reason == "error" for inbox in inboxes)
    with pytest.raises(BusyError, match="shutting down"):
        engine.submit(setup.prompts[0], Inbox())


def test_a_patient_stop_finishes_what_is_there(setup):
    engine = Engine(setup.plan, setup.params, SHAPE)
    inboxes = [Inbox() for _ in range(5)]
    for number, inbox in enumerate(inboxes):
        engine.submit(setup.prompts[number], inbox)
    engine.start()
    engine.stop(patience_s=120)
    assert [inbox.ids for inbox in inboxes] == setup.plain[:5]


def test_a_receiver_that_fails_loses_its_own_request_only(setup):
    engine = Engine(setup.plan, setup.params, SHAPE)

    def broken(_: Update) -> None:
        raise RuntimeError("no disk")

    other = Inbox()
    engine.submit(setup.prompts[1], broken)
    engine.submit(setup.prompts[0], other)
    engine.start()
    assert other.wait().ids == setup.plain[0]
    wait_until(lambda: engine.occupied == 0)
    engine.stop(patience_s=60)
    assert engine.failure is None


def test_an_engine_that_fails_says_so(setup):
    engine = Engine(setup.plan, setup.params, SHAPE)
    engine._state = None  # pyright: ignore[reportAttributeAccessIssue]
    inbox = Inbox()
    engine.submit(setup.prompts[0], inbox)
    engine.start()
    assert inbox.wait().reason == "error"
    wait_until(lambda: engine.failure is not None)
    assert "the engine failed" in str(engine.stuck(60))
    with pytest.raises(BusyError):
        engine.submit(setup.prompts[0], Inbox())


def test_a_run_that_fails_ends_nobody_twice(setup, monkeypatch):
    """One request ends in the run before, and is told while the run that fails is under way."""
    engine = Engine(setup.plan, setup.params, SHAPE)
    run, runs = engine._run, []

    def fail_second(*arguments):
        runs.append(arguments)
        if len(runs) == 2:
            raise RuntimeError("no memory")
        return run(*arguments)

    monkeypatch.setattr(engine, "_run", fail_second)
    ended: dict[str, list[str]] = {"short": [], "long": []}

    def note(name: str, update: Update) -> None:
        ended[name] += [update.finish_reason] if update.finish_reason else []

    short = dataclasses.replace(setup.prompts[0], max_tokens=1)
    engine.submit(short, functools.partial(note, "short"))
    engine.submit(setup.prompts[1], functools.partial(note, "long"))
    engine.start()
    wait_until(lambda: not engine._thread.is_alive())
    assert ended == {"short": ["length"], "long": ["error"]}
    count = engine.metrics.registry.get_sample_value
    counted = [
        count("mmflash_requests_finished_total", {"reason": r}) for r in ("length", "stop", "error")
    ]
    assert counted == [1, None, 1]


def test_a_loop_that_hangs_is_seen(setup):
    """C05: something in the loop blocks; the engine says for how long."""
    engine, go_on = Engine(setup.plan, setup.params, SHAPE), threading.Event()
    engine.submit(setup.prompts[0], lambda _: go_on.wait(60))
    assert engine.stuck(0.2) == "the engine is not running"
    engine.start()
    wait_until(lambda: "has not finished a turn" in str(engine.stuck(0.2)))
    go_on.set()
    wait_until(lambda: engine.stuck(0.2) is None)
    engine.stop(patience_s=60)


def test_a_prompt_that_hangs_is_seen(setup, monkeypatch):
    """C05 once more: nothing decodes and nothing waits, and still the engine is at work."""
    engine, go_on = Engine(setup.plan, setup.params, SHAPE), threading.Event()
    pieces = type(engine._pieces)
    prefill = pieces.prefill

    def hang(self, prompt):
        go_on.wait(60)
        yield from prefill(self, prompt)

    monkeypatch.setattr(pieces, "prefill", hang)
    inbox = Inbox()
    engine.submit(setup.prompts[0], inbox)
    engine.start()
    wait_until(lambda: "has not finished a turn" in str(engine.stuck(0.2)))
    assert engine.metrics.registry.get_sample_value("mmflash_requests_running") == 1
    go_on.set()
    assert inbox.wait().ids == setup.plain[0]
    engine.stop(patience_s=60)


def test_a_short_prompt_overtakes_a_long_one(setup):
    """Prompts are prefilled in turns, a chunk at a time; what decodes goes on meanwhile."""
    engine, told = Engine(setup.plan, setup.params, SHAPE, prefill=32), []
    inboxes = {name: Inbox() for name in ("first", "long", "short")}

    def receiver(name):
        def receive(update: Update) -> None:
            told.append(name)
            inboxes[name](update)

        return receive

    # Row 1 has 90 tokens in chunks of 32, row 0 has 5.
    for name, number in (("first", 0), ("long", 1), ("short", 5)):
        engine.submit(setup.prompts[number], receiver(name))
    engine.start()
    for inbox in inboxes.values():
        inbox.wait()
    engine.stop(patience_s=60)
    assert told.index("first") < told.index("short") < told.index("long")
    assert inboxes["long"].ids == setup.plain[1]


@pytest.mark.parametrize(("run_s", "most"), [(1e-9, SHORT_RUN), (1e9, 7), (None, 7)])
def test_a_run_takes_the_time_that_it_is_given(setup, run_s, most):
    """Short runs while nothing is known of a step's time; then as many steps as fit."""
    shape = dataclasses.replace(SHAPE, steps=7, paces=((3, 4),))
    engine, inbox = Engine(setup.plan, setup.params, shape, run_s=run_s), Inbox()
    engine.submit(setup.prompts[1], inbox)
    engine.start()
    assert inbox.wait().ids == setup.plain[1]
    engine.stop(patience_s=60)
    taken = np.diff([0, *(update.steps for update in inbox.updates)])
    assert taken[0] == (7 if run_s is None else SHORT_RUN)
    assert taken.max() == most


def test_an_engine_that_was_idle_is_not_stuck_when_work_comes(setup, engine):
    wait_until(lambda: engine.occupied == engine.waiting == 0)
    engine.beat -= 1000
    inbox = Inbox()
    engine.submit(setup.prompts[0], inbox)
    assert engine.stuck(60) is None
    inbox.wait()
