"""Checks a trained folder the way a user would run it.

`python -m mmflash_jax.demo.recipe.check_hf FOLDER`

The folder is loaded by transformers in float32 on a CPU; tokenizer, chat template and image
processor are its own. Answers to fresh held-out charts are generated with the picture, a blank one,
and another chart's.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from mmflash_jax.demo.charts import STYLES
from mmflash_jax.demo.corpus import is_correct, sample_examples
from mmflash_jax.demo.recipe.evaluate import PICTURES, count_read, shown_images
from mmflash_jax.demo.recipe.families import family_of

_MOST_NEW_TOKENS = 160


class FolderUser:
    """A model folder with everything that belongs to it."""

    def __init__(self, folder: Path) -> None:
        self.family = family_of(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        load = AutoModelForImageTextToText.from_pretrained
        self.model = load(folder, dtype=torch.float32).eval()

    def prompt(self, question: str, image_tokens: int) -> torch.Tensor:
        """Ids of a prompt with one picture, its pad replaced by the picture's tokens."""
        content = [{"type": "image"}, {"type": "text", "text": question}]
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        marks = self.family.marks
        text = text.replace(marks.image_pad, marks.picture(image_tokens))
        return torch.tensor([self.tokenizer(text, add_special_tokens=False).input_ids])

    @torch.no_grad()
    def answer(self, image: np.ndarray, question: str) -> tuple[str, int]:
        """The greedy answer and its length in tokens."""
        outputs = self.processor(images=[Image.fromarray(image)], return_tensors="np")
        inputs, image_tokens = self.family.picture_inputs(self.processor, outputs)
        ids = self.prompt(question, image_tokens)
        output = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == self.model.config.image_token_id).int(),
            **inputs,
            max_new_tokens=_MOST_NEW_TOKENS,
            do_sample=False,
        )
        new_ids = output[0, ids.shape[1] :]
        return self.tokenizer.decode(new_ids, skip_special_tokens=True), len(new_ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=40, help="charts of each style")
    parser.add_argument("--seed", type=int, default=31337)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    user = FolderUser(arguments.folder)
    for style in STYLES:
        examples = sample_examples(arguments.count, arguments.seed, style=style, held_out=True)
        for picture in PICTURES:
            right, read, lengths = 0, 0, []
            images = shown_images(examples, picture)
            for example, image in zip(examples, images, strict=True):
                text, length = user.answer(image, example.question)
                right += is_correct(text, example)
                read += count_read(text, example)
                lengths.append(length)
            pairs = sum(len(example.labels) for example in examples)
            result = {
                "style": style,
                "picture": picture,
                "right": f"{right}/{len(examples)}",
                "read": round(read / pairs, 3),
                "answer_tokens": round(float(np.mean(lengths)), 1),
                "last": text,
            }
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
