"""Configs: every shipped YAML loads, and each mistake is named by file and dotted field."""

import dataclasses
import json
from pathlib import Path

import pytest

from mmflash_jax.config import SamplingSettings, ServeConfig
from mmflash_jax.config_drafts import DraftShape, MTPShape
from mmflash_jax.config_files import as_values, build, find_config, read_yaml
from mmflash_jax.config_train import ChartData, FileData, TrainConfig
from mmflash_jax.weights.hf_config import ConfigError

CONFIGS = Path(__file__).parent.parent / "configs"

SMALLEST = """\
target: demo
output: runs/x
draft:
  num_hidden_layers: 1
  intermediate_size: 64
  num_attention_heads: 2
  num_key_value_heads: 1
  head_dim: 16
  mask_token: <|mask|>
data: {kind: charts}
"""


def train_config(tmp_path: Path, text: str) -> TrainConfig:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return read_yaml(path, TrainConfig)


def test_the_demo_config_resolves_to_these_values():
    """Values of the run that made the shipped draft; a change of a default would show here."""
    config = read_yaml(find_config("demo_qwen35.yaml"), TrainConfig)
    values = dataclasses.asdict(config)
    assert values["target"] == "demo"
    assert values["draft"]["block_size"] == 16
    assert values["draft"]["target_layer_ids"] is None
    assert values["draft"]["sliding_window"] is None
    assert values["data"]["kind"] == "charts"
    assert values["objective"] == {
        "anchors": 32, "loss": "ce", "position": "decay", "decay": 7.0, "dpace_alpha": 0.5,
        "chunk": None,
    }  # fmt: skip
    assert values["optimiser"]["warmup"] == 0.04
    assert values["optimiser"]["weight_decay"] == 0.01
    assert values["optimiser"]["clip"] == 1.0
    assert values["dtype"] == "auto"


def test_flags_come_before_the_file_and_the_file_before_defaults(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(SMALLEST + "optimiser: {steps: 7, batch: 3}\n")
    flags = ["--optimiser.steps", "9", "--row-length=128", "--mesh.data", "3", "--output", "a/b",
             "--optimiser.learning_rate", "6e-4", "--draft.layer_types", "[full_attention]",
             "--tensorboard", "false"]  # fmt: skip
    config = read_yaml(path, TrainConfig, flags)
    assert (config.optimiser.steps, config.optimiser.batch, config.optimiser.warmup) == (9, 3, 0.04)
    assert (config.row_length, config.mesh.data, config.mesh.fsdp) == (128, 3, 1)
    assert (config.output, config.optimiser.learning_rate) == (Path("a/b"), 6e-4)
    assert isinstance(config.draft, DraftShape)
    assert (config.draft.layer_types, config.tensorboard) == (("full_attention",), False)
    # What a file must name may be named by a flag alone; a kind may change.
    path.write_text(SMALLEST.replace("target: demo\n", ""))
    flags = ["--target", "x", "--data", "{kind: jsonl, path: p.jsonl}"]
    config = read_yaml(path, TrainConfig, flags)
    assert (config.target, config.data) == ("x", FileData(path=Path("p.jsonl")))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.name)
def test_a_config_survives_being_written_as_json(path):
    config = read_yaml(path, TrainConfig)
    values = json.loads(json.dumps(as_values(config)))
    assert build(TrainConfig, values, "") == config
    assert values["optimiser"]["warmup"] == 0.04, "defaults are written out"


def test_defaults_fill_what_a_file_leaves_out(tmp_path):
    config = train_config(tmp_path, SMALLEST)
    assert config.output == Path("runs/x")
    assert config.data == ChartData(count=1000, seed=0)
    assert config.optimiser.steps == 1000
    assert isinstance(config.draft, DraftShape)
    assert config.draft.layer_types is None


def test_a_union_is_chosen_by_kind(tmp_path):
    text = SMALLEST.replace("{kind: charts}", "{kind: jsonl, path: p.jsonl, held_out: 3}")
    assert train_config(tmp_path, text).data == FileData(path=Path("p.jsonl"), held_out=3)
    data = train_config(tmp_path, text.replace("kind: jsonl", "kind: parquet")).data
    assert data == FileData(path=Path("p.jsonl"), kind="parquet", held_out=3)


EAGLE3 = (
    "{kind: eagle3, intermediate_size: 8, num_attention_heads: 1, num_key_value_heads: 1, "
    "head_dim: 8, %s}"
)


def test_a_draft_is_dflash_if_no_kind_is_named(tmp_path):
    text = "target: x\noutput: y\ndata: {kind: charts}\ndraft: "
    config = train_config(tmp_path, text + "{kind: mtp, draft_tokens: 7}\n")
    assert config.draft == MTPShape(draft_tokens=7)
    for draft, words in (
        ("{draft_tokens: 7}", r"unknown fields \['draft.draft_tokens'\]"),
        ("{kind: eagle}", r"draft.kind is 'eagle', allowed: \['dflash', 'eagle3', 'mtp'\]"),
        ("{kind: mtp, draft_tokens: 0}", "draft.draft_tokens is 0, it must be positive"),
        (EAGLE3 % "mask_token: x", r"unknown fields \['draft.mask_token'\]"),
        (EAGLE3 % "draft_vocab_size: 9", r"unknown fields \['draft.draft_vocab_size'\]"),
        (EAGLE3 % "target_layer_ids: [1, 2]", r"ids is \[1, 2\], it must be three different"),
        (EAGLE3 % "target_layer_ids: [1, 2, 1]", r"\[1, 2, 1\], it must be three different"),
        (EAGLE3 % "target_layer_ids: [0, 1, 2]", "layer 0 is the first; name it later"),
    ):
        with pytest.raises(ConfigError, match=words):
            train_config(tmp_path, f"{text}{draft}\n")


def test_serving_and_answering_sample_by_the_same_fields(tmp_path):
    text = SMALLEST + "generate: {temperature: 0.7, top_p: 0.9, seed: 3, draft: some/draft}\n"
    generate = train_config(tmp_path, text).generate
    assert (generate.draft, generate.max_tokens) == ("some/draft", 256)
    settings = SamplingSettings(temperature=0.7, top_p=0.9, seed=3)
    assert generate.sampling == settings
    assert ServeConfig(temperature=0.7, top_p=0.9, seed=3).sampling == settings
    seeds = {generate.of_row(number).seed for number in range(9)}
    assert len(seeds) == 9
    assert not seeds & {dataclasses.replace(settings, seed=4).of_row(n).seed for n in range(9)}


@pytest.mark.parametrize(
    ("written", "value"), [("6e-4", 6e-4), ("6.0e-4", 6e-4), ("1", 1.0), ("'0.5'", 0.5)]
)
def test_floats_may_be_written_as_yaml_1_1_misreads_them(tmp_path, written, value):
    config = train_config(tmp_path, SMALLEST + f"optimiser: {{learning_rate: {written}}}\n")
    assert config.optimiser.learning_rate == value
    assert isinstance(config.optimiser.learning_rate, float)


def test_lists_become_tuples(tmp_path):
    text = SMALLEST.replace(
        "  head_dim: 16\n",
        "  head_dim: 16\n  target_layer_ids: [1, 5]\n  layer_types: [sliding_attention]\n",
    )
    draft = train_config(tmp_path, text).draft
    assert isinstance(draft, DraftShape)
    assert draft.target_layer_ids == (1, 5)
    assert draft.layer_types == ("sliding_attention",)
    # Plans are static arguments of compiled functions.
    assert hash(draft) == hash(dataclasses.replace(draft))


MISTAKES = {
    "typing error in a field": ("generat: {batch: 3}", r"unknown fields \['generat'\]; known are"),
    "unknown nested field": (
        "optimiser: {step: 3}",
        r"unknown fields \['optimiser.step'\].*'steps'",
    ),
    "a string for a number": ("optimiser: {steps: many}", "optimiser.steps is 'many', expected in"),
    "a fraction for a count": ("optimiser: {steps: 1.5}", "optimiser.steps is 1.5, expected int"),
    "a flag for a count": ("optimiser: {steps: true}", "optimiser.steps is True, expected int"),
    "a flag for a float": ("objective: {decay: true}", "objective.decay is True, expected float"),
    "no number": ("objective: {decay: .nan}", "objective.decay is nan, expected float"),
    "a word for a float": ("objective: {decay: slow}", "objective.decay is 'slow', expected float"),
    "a number for a word": ("dtype: 16", "dtype is 16, allowed: .*'bfloat16'"),
    "a list for a mapping": ("generate: [1]", r"generate is \[1\], expected a mapping for Gen"),
    "nothing for a mapping": ("generate:", "generate is None, expected a mapping"),
    "not positive": ("optimiser: {batch: 0}", "optimiser.batch is 0, it must be positive"),
    "no probability": ("generate: {top_p: 0}", "generate.top_p is 0.0, must be above 0, up to 1"),
    "another place": ("features: ram", r"features is 'ram', allowed: \['online', 'disk'\]"),
    "no log": ("log_every: 0", "log_every is 0, it must be positive"),
    "negative": ("eval_prompts: -1", "eval_prompts is -1, it must not be negative"),
    "no share": ("optimiser: {warmup: 4}", "optimiser.warmup is 4.0, it must be a share"),
    "more anchors than tokens": (
        "objective: {anchors: 65}\nrow_length: 64",
        "objective.anchors is 65, a row of row_length 64",
    ),
}


@pytest.mark.parametrize(("added", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_names_file_field_and_value(tmp_path, added, message):
    with pytest.raises(ConfigError, match=message) as error:
        train_config(tmp_path, SMALLEST + added + "\n")
    assert str(error.value).startswith(f"{tmp_path / 'run.yaml'}: ")


REPLACED = {
    "missing": ("target: demo\n", "", r"missing fields \['target'\]"),
    "missing inside": ("  head_dim: 16\n", "", r"missing fields \['draft.head_dim'\]"),
    "null for a required number": (
        "head_dim: 16", "head_dim: null", "draft.head_dim is None, expected int",
    ),
    "a scalar for a list": (
        "head_dim: 16", "head_dim: 16\n  target_layer_ids: 3",
        "draft.target_layer_ids is 3, expected a list",
    ),
    "a word in a list": (
        "head_dim: 16", "head_dim: 16\n  target_layer_ids: [1, x]",
        r"draft.target_layer_ids\[1\] is 'x', expected int",
    ),
    "a block of one": (
        "head_dim: 16", "head_dim: 16\n  block_size: 1", "draft.block_size is 1, it must be at le",
    ),
    "unknown kind": (
        "kind: charts", "kind: plots", r"is 'plots', allowed: \['charts', 'jsonl', 'parquet'\]",
    ),
    "no kind": ("{kind: charts}", "{count: 3}", "data.kind is None"),
    "a field of the other kind": (
        "{kind: charts}", "{kind: charts, path: x}", r"unknown fields \['data.path'\]",
    ),
    "a kind without its fields": ("kind: charts", "kind: jsonl", r"missing fields \['data.path'\]"),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "message"), REPLACED.values(), ids=REPLACED.keys())
def test_a_replaced_field_is_named(tmp_path, old, new, message):
    with pytest.raises(ConfigError, match=message):
        train_config(tmp_path, SMALLEST.replace(old, new))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is None, expected a mapping for TrainConfig"),
        ("- a\n", r"the file is \['a'\], expected a mapping"),
        ("target: [demo\n", "is not valid YAML"),
        ("a: \x00\n", "is not valid YAML"),
    ],
)
def test_a_file_that_is_no_config(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        train_config(tmp_path, text)


def test_a_wrong_name_lists_the_known_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_config("demo_qwen35.yaml") == CONFIGS / "demo_qwen35.yaml"
    with pytest.raises(ConfigError, match=r"no config 'demo.yaml'.*holds .*demo_qwen35.yaml"):
        find_config("demo.yaml")
    # A folder of that name is no config either.
    (tmp_path / "demo.yaml").mkdir()
    with pytest.raises(ConfigError, match="no config"):
        find_config("demo.yaml")


def test_a_path_comes_before_a_bare_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("demo_qwen35.yaml").write_text(SMALLEST)
    assert read_yaml(find_config("demo_qwen35.yaml"), TrainConfig).optimiser.steps == 1000


@pytest.mark.parametrize("name", ["max_tokens", "max_length", "batch", "model_parallel"])
@pytest.mark.parametrize("value", [0, -3])
def test_serving_limits_are_positive(name, value):
    with pytest.raises(ConfigError, match=f"{name} is {value}, it must be positive"):
        ServeConfig(**{name: value})


@pytest.mark.parametrize("kernels", ["gpu", "interpret"])
def test_kernels_by_name_are_refused_over_several_devices(kernels):
    with pytest.raises(ConfigError, match=f"kernels is {kernels} and model_parallel is 2"):
        ServeConfig(kernels=kernels, model_parallel=2)
    for kept in (ServeConfig(model_parallel=2), ServeConfig(kernels=kernels)):
        assert kept.kernels in ("auto", kernels)


def test_kernels_train_on_one_device(tmp_path):
    text = SMALLEST + "kernels: gpu\n"
    assert train_config(tmp_path, text).kernels == "gpu"
    with pytest.raises(ConfigError, match="kernels is gpu and mesh has 2 devices"):
        train_config(tmp_path, text + "mesh: {data: 2}\n")
    auto = text.replace("gpu", "auto") + "mesh: {data: 2}\n"
    assert train_config(tmp_path, auto).kernels == "auto"
    head = "{kind: eagle3, intermediate_size: 8, num_attention_heads: 2, num_key_value_heads: 1"
    start, end = text.index("draft:"), text.index("data:")
    trees = f"{text[:start]}draft: {head}, head_dim: 16}}\n{text[end:]}"
    with pytest.raises(ConfigError, match=r"kernels is gpu and draft\.kind is eagle3"):
        train_config(tmp_path, trees)


def test_serve_config_can_be_built_from_values_as_well():
    config = build(ServeConfig, {"target": "x", "output": "o.jsonl", "thinking": None}, "")
    assert config == ServeConfig(target="x", output=Path("o.jsonl"))
