"""Both bundled pairs in the engine, with pictures and long prompts (B16)."""

import pytest

from mmflash_jax.config import ServeConfig
from mmflash_jax.decode.records import Plan
from mmflash_jax.decode.slots import Shape
from mmflash_jax.drafters import NoDraft
from mmflash_jax.engine.offline import answer
from mmflash_jax.engine.prompts import Request
from mmflash_jax.engine.serving import Engine
from mmflash_jax.evaluation.batch import load
from mmflash_jax.registry import DEMO
from tests.engine.test_serving import Inbox

CHARTS = sorted((DEMO / "samples").glob("*.png"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["demo", "demo-gemma4"])
def test_a_bundled_pair_is_served(name):
    """Prompts longer than the sliding window and than a chunk, pictures across chunk edges."""
    session = load(ServeConfig(target=name))
    asked = [("Which country is highest?", CHARTS[:1]), ("Compare them. " * 30, CHARTS[1:3])]
    prompts = [
        session.encoder.encode(Request(text=text, images=tuple(images), max_tokens=60))
        for text, images in asked
    ]
    largest = max(len(image.patches) for prompt in prompts for image in prompt.images)
    shape = Shape(slots=2, capacity=512, widths=(64,), image_sizes=(largest,))
    engine = Engine(session.plan, session.params, shape)
    engine.warm_up(prompts[0].images[0])
    assert all(len(prompt.ids) > 64 for prompt in prompts)
    inboxes = [Inbox() for _ in prompts]
    for prompt, inbox in zip(prompts, inboxes, strict=True):
        engine.submit(prompt, inbox)
    engine.start()
    plain = Plan(session.plan.target, NoDraft(), session.plan.stop_ids)
    wanted = answer(plan=plain, params=session.params, prompts=prompts, batch=2).completions
    for inbox, completion in zip(inboxes, wanted, strict=True):
        assert inbox.wait().ids == completion.token_ids
    # A draft is accepted after an image and several chunks, on a question like those it learnt.
    assert len(inboxes[0].ids) / inboxes[0].updates[-1].steps > 3
    engine.stop(patience_s=60)
