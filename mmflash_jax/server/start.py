"""From settings to a running server."""

import logging
import sys

import uvicorn

from mmflash_jax.config import ServeConfig
from mmflash_jax.decode.records import PatchedImage
from mmflash_jax.decode.slots import Shape
from mmflash_jax.engine.planning import (
    check_memory,
    chunk_sizes,
    free_memory,
    image_sizes,
    large_image,
    paces,
)
from mmflash_jax.engine.serving import Engine
from mmflash_jax.evaluation.batch import Session, load
from mmflash_jax.server.app import Site, make_app
from mmflash_jax.server.generate import Defaults
from mmflash_jax.server.images import ImageLimits

log = logging.getLogger(__name__)

SWITCH_S = 2e-4


def make_shape(config: ServeConfig, session: Session, largest: PatchedImage) -> Shape:
    """Sizes for what `config` allows and the checkpoint's image processor makes."""
    plan = session.plan
    capacity = min(config.max_length, plan.target.config.max_position_embeddings)
    return Shape(
        slots=config.batch,
        capacity=capacity,
        widths=chunk_sizes(capacity),
        image_sizes=image_sizes(largest, capacity, plan.target.image_side),
        paces=paces(config.batch, plan.drafter.block) if config.adapt else (),
    )


def make_site(config: ServeConfig, session: Session, shape: Shape | None = None) -> Site:
    """A warmed-up engine for a loaded pair, and what the routes need besides it.

    Raises:
        DoesNotFitError: the caches are larger than the device.
    """
    plan, params = session.plan, session.params
    largest = large_image(session.encoder)
    shape = shape or make_shape(config, session, largest)
    check_memory(plan, shape, free_memory())
    # The thread that starts the next run must not wait for those that write answers: by default
    # Python lets a thread keep the interpreter for 5 ms, as long as a step takes.
    sys.setswitchinterval(SWITCH_S)
    engine = Engine(
        plan, params, shape, queue=config.max_queue, prefill=config.prefill_tokens,
        run_s=config.run_ms / 1e3,
    )  # fmt: skip
    engine.warm_up(largest)
    return Site(
        engine=engine,
        encoder=session.encoder,
        model=config.served_name or config.target,
        defaults=Defaults(max_tokens=config.max_tokens, sampling=config.sampling),
        images=ImageLimits(
            root=config.image_root,
            most_bytes=int(config.max_image_mb * 2**20),
            count=config.max_images,
            fetch_s=config.fetch_seconds if config.allow_http_images else None,
        ),
        api_key=config.api_key,
    )


def serve(config: ServeConfig, port: int) -> int:
    """Load, compile, then answer until told to stop; returns the exit code."""
    print(f"loading {config.target} and compiling; the first start takes longest", flush=True)
    site = make_site(config, load(config))
    server = uvicorn.Server(
        uvicorn.Config(
            make_app(site),
            host=config.host,
            port=port,
            log_level="warning",
            timeout_graceful_shutdown=int(site.patience_s),
        )
    )
    print(f"{site.model} is served at http://{config.host}:{port}/v1", flush=True)
    server.run()
    return 0 if server.started and site.engine.failure is None else 1
