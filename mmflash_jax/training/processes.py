"""One run over several processes, as a pod or a cluster starts them.

Every process holds all rows and the whole target, and computes its devices' share of each step.
Process 0 alone writes answers, metrics and the exported draft; features on disk are written and
read by the processes whose devices need them. All share the output folder.
"""

import os
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

T = TypeVar("T")


def start_processes() -> None:
    """Join the other processes if the environment says there are any; before any computation.

    `JAX_COORDINATOR_ADDRESS` (host:port of process 0) turns it on. `JAX_NUM_PROCESSES` and
    `JAX_PROCESS_ID` say how many there are and which one this is; without them jax asks the cluster
    it runs in (Slurm, Open MPI, Kubernetes, Cloud TPU).
    """
    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    if not address:
        return
    count, index = os.environ.get("JAX_NUM_PROCESSES"), os.environ.get("JAX_PROCESS_ID")
    jax.distributed.initialize(
        address,
        None if count is None else int(count),
        None if index is None else int(index),
    )


def first_then_others(work: Callable[[], T]) -> T:
    """`work` done by process 0, then by the others, which find what the first one wrote."""
    if jax.process_count() == 1:
        return work()
    if jax.process_index() == 0:
        done = work()
        wait_for_all()
        return done
    wait_for_all()
    return work()


def wait_for_all() -> None:
    """Return when every process has called this. One that ended early would be taken for dead."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("wait_for_all")


def largest_anywhere(value: int) -> int:
    """The largest of a number that every process brings; all must call it at the same step."""
    if jax.process_count() == 1:
        return value
    return int(np.max(multihost_utils.process_allgather(np.array(value))))
