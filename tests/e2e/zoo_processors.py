# SPDX-License-Identifier: Apache-2.0
"""Tokenizers and image processors for tiny checkpoints: words that are numbers, and images of a few patches."""

from pathlib import Path

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

IMAGE, VIDEO, VISION_START, VISION_END = 100, 101, 102, 103
"""Tokens that stand for what is in a prompt beside text."""
_NAMES = {0: "<s>", 1: "</s>", 2: "<pad>", 3: "<unk>"}
_NAMES |= {IMAGE: "<|image_pad|>", VIDEO: "<|video_pad|>"}
_NAMES |= {VISION_START: "<|vision_start|>", VISION_END: "<|vision_end|>"}


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """128 words: `w5` is token 5."""
    words = {_NAMES.get(number, f"w{number}"): number for number in range(128)}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=[_NAMES[number] for number in (IMAGE, VIDEO, VISION_START, VISION_END)],
    )


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer alone."""
    tokenizer().save_pretrained(folder)


def write_qwen_vl(folder: Path, processor: str = "Qwen2_5_VLProcessor", patch: int = 14) -> None:
    """Write a processor of Qwen's, for images of 2 to 16 patches a side."""
    sides = {"min_pixels": (2 * patch) ** 2, "max_pixels": (16 * patch) ** 2}
    images = transformers.Qwen2VLImageProcessor(**sides, patch_size=patch, merge_size=2)
    videos = "Qwen3VLVideoProcessor" if processor == "Qwen3VLProcessor" else "Qwen2VLVideoProcessor"
    getattr(transformers, processor)(
        image_processor=images,
        tokenizer=tokenizer(),
        video_processor=getattr(transformers, videos)(patch_size=patch),
        chat_template="{{ messages }}",
    ).save_pretrained(folder)
