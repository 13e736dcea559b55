# SPDX-License-Identifier: Apache-2.0
"""Files of prompts to calibrate with."""

from pathlib import Path

import pytest

from vllm_fp8ext.calibrate.prompts import MOST, read_prompts


def tokenize(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def written(folder: Path, *lines: str) -> Path:
    file = folder / "prompts"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def test_every_form(tmp_path: Path):
    lines = [
        "1 2 3",
        "",
        "[4, 5]",
        '"ab"',
        '{"prompt": "c"}',
        '{"prompt_token_ids": [6]}',
        '{"prompt": [7]}',
        "8",
    ]
    prompts_read = read_prompts(written(tmp_path, *lines), tokenize, 100)
    assert prompts_read == [[1, 2, 3], [4, 5], [97, 98], [99], [6], [7], [8]]


def test_no_more_tokens_than_wanted(tmp_path: Path):
    assert read_prompts(written(tmp_path, "1 2 3", "4 5 6", "x"), tokenize, 5) == [[1, 2, 3], [4, 5]]


def test_many_short_prompts(tmp_path: Path):
    lines = ["1"] * (MOST + 1)
    assert len(read_prompts(written(tmp_path, *lines[1:]), tokenize, 1000)) == MOST
    with pytest.raises(ValueError, match=f"found {MOST} in the first {MOST}; .* --tokens {MOST}$"):
        read_prompts(written(tmp_path, *lines), tokenize, 1000)


@pytest.mark.parametrize(
    "line", ["one two", "1 -2", "[]", '""', "[1, true]", "[1.5]", "[-1]", '{"text": "a"}', "null", "{"]
)
def test_a_line_that_is_none(tmp_path: Path, line: str):
    with pytest.raises(ValueError, match="prompts:2: expected token ids") as raised:
        read_prompts(written(tmp_path, "1", line), tokenize, 100)
    assert str(raised.value).endswith(f"found {line}")


def test_an_empty_file(tmp_path: Path):
    with pytest.raises(ValueError, match="expected a prompt a line, found none"):
        read_prompts(written(tmp_path, ""), tokenize, 100)
