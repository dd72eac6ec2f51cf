"""Trains the demo target: `python -m mmflash_jax.demo.recipe.train_target --output DIR` on a GPU.

`--family gemma4` trains the other family, by the same script on the same data. First the image
tower alone learns to name glyphs, then the whole model learns to answer, on snapped charts and
later also on ordinary ones. The time limit counts from the start of the process. `--smoke` runs a
few steps on a CPU.
"""

import argparse
import dataclasses
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional

from mmflash_jax.demo.charts import STYLES
from mmflash_jax.demo.recipe.evaluate import PICTURES, Evaluator
from mmflash_jax.demo.recipe.export import write_configuration, write_weights
from mmflash_jax.demo.recipe.families import FAMILIES
from mmflash_jax.demo.recipe.family import Family
from mmflash_jax.demo.recipe.feed import ExampleFeed, FeedSettings
from mmflash_jax.demo.recipe.glyphs import GlyphNamer
from mmflash_jax.demo.recipe.graphs import capture
from mmflash_jax.demo.recipe.optimizer import MuonAdam
from mmflash_jax.demo.recipe.prompts import SEQUENCE_LENGTH, PromptWriter
from mmflash_jax.demo.recipe.settings import TrainSettings, smoke_settings
from mmflash_jax.demo.recipe.tokenizer import padded_vocabulary, write_tokenizer

_DRAWN_AT_ONCE = 32  # batches of ring entries drawn together


class TargetTrainer:
    """Owns the network, its data and the log of one run."""

    def __init__(self, family: Family[Any], settings: TrainSettings, output: Path) -> None:
        self.started = time.monotonic()
        self.family, self.settings, self.output = family, settings, output
        tokenizer = write_tokenizer(output, family)
        self.shape = family.shape(padded_vocabulary(tokenizer))
        write_configuration(output, family, self.shape, tokenizer)
        writer = PromptWriter(tokenizer, family.marks, self.shape.image_tokens)
        feed_settings = FeedSettings(
            settings.workers, settings.chunk, settings.pool, settings.seed + 1
        )
        self.feed = ExampleFeed(feed_settings, writer)
        dtype = torch.bfloat16 if settings.device == "cuda" else torch.float32
        self.network = family.network(
            family.initial_weights(self.shape, settings.seed),
            self.shape,
            writer.prefix_length,
            SEQUENCE_LENGTH,
            settings.device,
            dtype,
            settings.compiled,
        )
        self.feed.attach(settings.device)
        self.namer = GlyphNamer(self.shape, settings.device, dtype, settings.seed + 1)
        count = settings.evaluation_count
        self.evaluator = Evaluator(
            self.network, writer, min(settings.batch, count), count, settings.decode_limit
        )
        self._meters = {
            name: torch.zeros((), device=settings.device) for name in ("answer", "glyph", "named")
        }
        self.curve: list[dict[str, Any]] = []
        self.figures: dict[str, Any] = {}
        parameters = sum(weight.numel() for weight in self.network.weights.values())
        self.figures["parameters"] = parameters
        self.say(f"{parameters:,} parameters, vocabulary {tokenizer.get_vocab_size()}")

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.started:6.1f} s  {text}", flush=True)

    def warm_up_tower(self) -> None:
        """Phase A: only the image tower and the glyph head are trained."""
        settings, device = self.settings, self.settings.device
        vision = [
            (name, weight)
            for name, weight in self.network.weights.items()
            if name.startswith(self.family.vision_prefixes)
        ]
        named = [*vision, ("glyph_head", self.namer.head)]
        optimizer = MuonAdam(named, 0.0, self.network.dtype)
        pictures, codes = self.namer.random_pictures(settings.batch)

        def one_step() -> None:
            optimizer.clear_gradients()
            loss, named_share = self.namer.loss(self.network.vision(pictures), codes)
            loss.backward()
            optimizer.step()
            self._meters["glyph"].copy_(loss.detach())
            self._meters["named"].copy_(named_share)

        run_step = capture(one_step, settings.graphs)
        for step in range(settings.glyph_steps):
            optimizer.learning_rate.fill_(settings.glyph_step_rate(step))
            new_pictures, new_codes = self.namer.random_pictures(settings.batch)
            pictures.copy_(new_pictures)
            codes.copy_(new_codes)
            run_step()
            if step % 10 == 0:
                self.feed.pump(4)
            if (step + 1) % (settings.glyph_steps // 3) == 0:
                self.say(f"glyph step {step + 1}: {self._read_meters()}")
        optimizer.clear_gradients()
        if device == "cuda":
            torch.cuda.synchronize()

    def train(self) -> None:
        """Phase B: the whole model, on the loss of the answer plus a little of the glyphs'."""
        settings = self.settings
        named = [*self.network.weights.items(), ("glyph_head", self.namer.head)]
        self.optimizer = MuonAdam(named, settings.weight_decay, self.network.dtype)
        self.index = torch.zeros(settings.batch, dtype=torch.long, device=settings.device)
        self.feed.wait_for(settings.first_fill)
        self.index.copy_(self.feed.draw(1, settings.batch, 0.0)[0])
        run_step = capture(self._one_step, settings.graphs)
        self.optimizer.reset()
        self.evaluator.prepare(settings.graphs)
        self.say("training and evaluation steps are ready")
        steps = self._train_until_time(run_step)
        self.figures["steps"] = steps
        self.figures["examples"] = steps * settings.batch
        self.figures["charts_made"] = list(self.feed.made)

    def _train_until_time(self, run_step: Any) -> int:
        settings = self.settings
        began = evaluated = time.monotonic()
        end = self.started + 60 * settings.minutes - settings.final_evaluation_s
        step = 0
        while step < settings.most_steps and (now := time.monotonic()) < end:
            progress = (now - began) / (end - began)
            ordinary_now = progress >= settings.ordinary_from
            # Ordinary charts are made ahead of their use.
            self.feed.wants_ordinary = progress >= settings.ordinary_from - 0.12
            if step % _DRAWN_AT_ONCE == 0:
                share = settings.ordinary_share if ordinary_now else 0.0
                drawn = self.feed.draw(_DRAWN_AT_ONCE, settings.batch, share)
                drawn = drawn.to(settings.device)
            self.index.copy_(drawn[step % _DRAWN_AT_ONCE])
            self.optimizer.learning_rate.fill_(settings.rate(step, progress))
            run_step()
            step += 1
            if step % 4 == 0:
                self.feed.pump(4)
            if step % _DRAWN_AT_ONCE == 0 and settings.device == "cuda":
                torch.cuda.synchronize()
            if step % settings.log_every == 0:
                pace = 1000 * (time.monotonic() - began) / step
                made = self.feed.made
                self.say(f"step {step}: {self._read_meters()}, {pace:.1f} ms a step, made {made}")
            if time.monotonic() - evaluated > settings.evaluate_every_s:
                self._evaluate_midway(step, ordinary_now)
                evaluated = time.monotonic()
        self.figures["training_s"] = round(time.monotonic() - began, 1)
        return step

    def _one_step(self) -> None:
        self.optimizer.clear_gradients()
        images, glyph_codes, ids, starts, ends = self.feed.gather(self.index)
        features = self.network.vision(images)
        glyph_loss, named_share = self.namer.loss(features, glyph_codes)
        answer_loss = self._answer_loss(ids, starts, ends, features)
        (answer_loss + self.settings.glyph_weight * glyph_loss).backward()
        self.optimizer.step()
        self._meters["answer"].copy_(answer_loss.detach())
        self._meters["glyph"].copy_(glyph_loss.detach())
        self._meters["named"].copy_(named_share)

    def _answer_loss(self, ids: Tensor, starts: Tensor, ends: Tensor, features: Tensor) -> Tensor:
        first = self.network.prefix_length + self.shape.image_tokens
        hidden = self.network.text(ids, features)[:, first:-1]
        targets = ids[:, first + 1 :]
        places = torch.arange(first + 1, SEQUENCE_LENGTH, device=ids.device)[None]
        counted = (places >= starts[:, None]) & (places < ends[:, None])
        logits = self.network.logits(hidden).reshape(-1, self.shape.vocabulary)
        loss = functional.cross_entropy(logits, targets.reshape(-1), reduction="none")
        loss = loss.view(targets.shape)
        return (loss * counted).sum() / counted.sum()

    def _read_meters(self) -> str:
        return ", ".join(f"{name} {meter.item():.4f}" for name, meter in self._meters.items())

    def _evaluate_midway(self, step: int, ordinary: bool) -> None:
        count = self.evaluator.batch
        for style in STYLES[: 2 if ordinary else 1]:
            result = self.evaluator.accuracy(style, "image", count)
            self.curve.append({"step": step, "seconds": self._seconds(), **result})
            self.say(json.dumps(result))
        self.save()

    def _seconds(self) -> float:
        return round(time.monotonic() - self.started, 1)

    def evaluate_finally(self) -> None:
        """Accuracy with the picture, blank ones and another chart's, and token statistics."""
        whole = self.settings.evaluation_count
        self.figures["accuracy"], self.figures["unsure_tokens"] = [], []
        for style in STYLES:
            for picture in PICTURES:
                count = whole if picture == "image" else self.evaluator.batch
                result = self.evaluator.accuracy(style, picture, count)
                self.figures["accuracy"].append(result)
                self.say(json.dumps(result))
        for style in STYLES:
            unsure = self.evaluator.unsure_tokens(style)
            self.figures["unsure_tokens"].append(unsure)
            self.say(json.dumps(unsure))
        self.save()

    def save(self) -> None:
        write_weights(self.output, self.network.state(), self.family.float32_suffixes)
        on_gpu = self.settings.device == "cuda"
        log = {
            "family": self.family.name,
            "settings": dataclasses.asdict(self.settings),
            "shape": dataclasses.asdict(self.shape),
            "device": torch.cuda.get_device_name() if on_gpu else "cpu",
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            "figures": self.figures,
            "curve": self.curve,
        }
        (self.output / "training_log.json").write_text(json.dumps(log, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=FAMILIES, default="qwen35")
    parser.add_argument("--output", type=Path, required=True, help="folder for the trained target")
    parser.add_argument("--minutes", type=float, help="wall time for everything")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="a few steps on a CPU")
    arguments = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1 if arguments.smoke else 2)
    torch.set_float32_matmul_precision("high")
    settings = smoke_settings() if arguments.smoke else TrainSettings()
    changes = {"seed": arguments.seed}
    if arguments.minutes is not None:
        changes["minutes"] = arguments.minutes
    settings = dataclasses.replace(settings, **changes)
    trainer = TargetTrainer(FAMILIES[arguments.family], settings, arguments.output)
    trainer.warm_up_tower()
    trainer.train()
    trainer.save()
    trainer.say(json.dumps(trainer.figures))
    trainer.evaluate_finally()
    trainer.feed.stop()


if __name__ == "__main__":
    main()
