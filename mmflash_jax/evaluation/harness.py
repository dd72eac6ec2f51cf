"""Methods x benchmarks x requests in flight, each beside plain decoding in the same run."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.errors import JaxRuntimeError
from tqdm import tqdm

from mmflash_jax.engine.journal import Journal
from mmflash_jax.engine.offline import Answers
from mmflash_jax.engine.planning import DoesNotFitError, check_memory, free_memory
from mmflash_jax.evaluation.batch import Session
from mmflash_jax.evaluation.benchmarks import BenchmarkError
from mmflash_jax.evaluation.evaluate_config import EvaluateConfig
from mmflash_jax.evaluation.in_flight import answer_in_flight, shape_for, warm_up
from mmflash_jax.evaluation.methods import load_methods, name_methods
from mmflash_jax.evaluation.records import PLAIN, Record, cell_figures, commit, key
from mmflash_jax.evaluation.report import describe_device, versions
from mmflash_jax.evaluation.workload import Workload, make_workload, name_benchmarks
from mmflash_jax.layers.schema import Params
from mmflash_jax.weights.hf_config import ConfigError

log = logging.getLogger(__name__)


def evaluate(
    config: EvaluateConfig, on_cells: Callable[[list[Record]], object] = lambda _: None
) -> tuple[list[Record], bool]:
    """Measure every cell that `config.output` lacks; returns all records, and if anything failed.

    A benchmark, method or number in flight that cannot be had is told and left out; the others are
    measured. A failed parity is a failure too. `on_cells` receives new records after they are
    written.

    Raises:
        ConfigError: the output folder has records of other settings, or two methods one label.
        BenchmarkError: there is no such benchmark, or it has no path.
        ValueError, OSError: the target cannot be loaded.
    """
    commit()
    methods = name_methods(config)
    named = name_benchmarks(config)
    sessions, failed = load_methods(config, methods)
    config.output.mkdir(parents=True, exist_ok=True)
    journal = journal_of(config, sessions[PLAIN])
    records = journal.read()
    _check_sources(records, methods, named, journal.path)
    with journal.append(keep=len(records)) as write:
        for name, path in named.items():
            lacking = _lacking(config, sessions, name, records)
            if not any(lacking.values()):
                continue
            try:
                work = make_workload(config, sessions[PLAIN], name, path)
            except BenchmarkError as error:
                log.error("%s", error)
                failed = True
                continue
            for slots, labels in lacking.items():
                if not labels:
                    continue
                try:
                    new = measure_cells(config, sessions, labels, methods, work, slots)
                except (DoesNotFitError, JaxRuntimeError) as error:
                    # Fewer in flight may fit.
                    log.error("%s with %d in flight: %s", name, slots, error)
                    failed = True
                    continue
                write(new)
                on_cells(new)
                records += new
    return records, failed or not all(record["parity"] for record in records)


def journal_of(config: EvaluateConfig, session: Session) -> Journal:
    """The records of `config.output`, under all settings that the cells of a table share."""
    names = (
        "target", "questions", "style", "max_tokens", "max_length", "repeats", "seed", "kernels",
        "thinking",
    )  # fmt: skip
    header = {name: getattr(config, name) for name in names}
    header |= {"dtype": session.plan.target.dtype, "device": describe_device()}
    return Journal(config.output / "records.jsonl", header, "measure anew, or name another output")


def _check_sources(
    records: Sequence[Record],
    methods: Mapping[str, str],
    paths: Mapping[str, Path | None],
    file: Path,
) -> None:
    """A label or benchmark must mean what it meant when its records were written."""
    for record in records:
        method, name = record["method"], record["benchmark"]
        path = paths.get(name)
        here = {"draft": methods.get(method), "path": None if path is None else str(path)}
        there = {"draft": record["draft"], "path": record["path"]}
        for field, of, meant in (("draft", method, methods), ("path", name, paths)):
            if of in meant and here[field] != there[field]:
                raise ConfigError(
                    f"{file} has {of} from {there[field]}, now it is {here[field]}; write another "
                    "LABEL=DRAFT or name another output"
                )


def _lacking(
    config: EvaluateConfig, sessions: Mapping[str, Session], name: str, records: Sequence[Record]
) -> dict[int, list[str]]:
    """Requests in flight -> methods that have no record of the benchmark."""
    known = {key(record) for record in records}
    return {
        slots: [label for label in sessions if (label, name, slots) not in known]
        for slots in config.concurrency
    }


def measure_cells(
    config: EvaluateConfig,
    sessions: Mapping[str, Session],
    labels: Sequence[str],
    methods: Mapping[str, str],
    work: Workload,
    slots: int,
) -> list[Record]:
    """Records of the methods `labels`, measured beside plain decoding.

    Raises:
        DoesNotFitError: the caches of so many rows are larger than the device.
    """
    measured = {label: sessions[label] for label in dict.fromkeys([PLAIN, *labels])}
    passes = take_turns(measured, work, slots, config.repeats)
    shared: dict[str, Any] = {
        "path": work.path, "seed": config.seed, "repeats": config.repeats, "style": config.style,
        "max_tokens": config.max_tokens, "kernels": config.kernels, "device": describe_device(),
        "versions": versions(), "commit": commit(),
    }  # fmt: skip
    records = []
    for label in labels:
        plan = measured[label].plan
        names = {
            "target": config.target, "method": label, "benchmark": work.benchmark,
            "concurrency": slots, "draft": methods[label], "block": plan.drafter.block,
            "draft_parameters": _count(measured[label].params["drafter"]),
            "dtype": plan.target.dtype,
        }  # fmt: skip
        figures = cell_figures(
            measured[label], work.questions, work.prompts, passes[label], passes[PLAIN]
        )
        records.append(names | figures | shared)
    return records


def _count(params: Params) -> int:
    """Numbers of a draft's own; heads that it borrows from the target are not among them."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def take_turns(
    sessions: Mapping[str, Session], work: Workload, slots: int, repeats: int
) -> dict[str, list[Answers]]:
    """Passes of every method over the prompts, in turns: a drifting clock rate meets them all."""
    shape = shape_for(work.prompts, slots)
    for session in sessions.values():
        check_memory(session.plan, shape, free_memory())
    for session in sessions.values():
        warm_up(session.plan, session.params, work.prompts, shape)
    passes: dict[str, list[Answers]] = {label: [] for label in sessions}
    total = repeats * len(sessions) * len(work.prompts)
    with tqdm(total=total, desc=f"{work.benchmark} x{slots}", unit="answer") as bar:
        for _ in range(repeats):
            for label, session in sessions.items():
                bar.set_postfix_str(label)
                passes[label].append(
                    answer_in_flight(session.plan, session.params, work.prompts, shape, bar.update)
                )
    return passes
