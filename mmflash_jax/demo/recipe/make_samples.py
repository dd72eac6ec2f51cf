"""Writes the sample prompts: eight held-out charts of both styles, every kind, varied questions.

`python -m mmflash_jax.demo.recipe.make_samples`; needs no torch.
"""

import json
from pathlib import Path

from PIL import Image

from mmflash_jax.demo.corpus import ChartExample, sample_examples

SAMPLES_DIR = Path(__file__).parents[1] / "samples"
_SEED = 2014
# (style, kind, question type) of each sample, in the order of the file.
_WANTED = (
    ("ordinary", "bar", "sum"),
    ("snapped", "hbar", "max"),
    ("ordinary", "line", "difference"),
    ("snapped", "bar", "rank"),
    ("ordinary", "hbar", "second"),
    ("snapped", "line", "describe"),
    ("ordinary", "bar", "compare"),
    ("snapped", "line", "value"),
)


def choose_samples() -> list[tuple[str, ChartExample]]:
    """The first example of each wanted sort whose file name is still free."""
    pool = sample_examples(2000, _SEED, held_out=True)
    chosen: dict[str, ChartExample] = {}
    for wanted in _WANTED:
        for example in pool:
            name = f"{example.kind}_{example.metric.replace(' ', '_')}"
            sort = (example.style, example.kind, example.question_type)
            fresh_metric = sum(example.metric == other.metric for other in chosen.values()) < 2
            if sort == wanted and name not in chosen and fresh_metric:
                chosen[name] = example
                break
    return list(chosen.items())


def main() -> None:
    SAMPLES_DIR.mkdir(exist_ok=True)
    lines = []
    for name, example in choose_samples():
        Image.fromarray(example.image).save(SAMPLES_DIR / f"{name}.png", optimize=True)
        prompt = {
            "id": name,
            "text": example.question,
            "images": [f"{name}.png"],
            "answer": example.answer,
        }
        lines.append(json.dumps(prompt))
    (SAMPLES_DIR / "prompts.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
