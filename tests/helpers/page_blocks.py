# SPDX-License-Identifier: Apache-2.0
"""Fenced blocks and commands of the pages, and which of the blocks no test runs, each with its reason."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page
    for pattern in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/*.md", "examples/*/README.md")
    for page in PROJECT.glob(pattern)
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SPAN = re.compile(r"`([^`\n]+)`")
COMMAND = re.compile(
    r"(\.venv/bin/)?(fp8ext|vllm serve|python|make|pip install|scripts/[\w-]+|benchmarks/\w+\.sh) \S"
)
"""How a command begins where a page has it within a sentence."""

GPU = "needs a GPU"
OTHER_ENVIRONMENT = "needs a trainer's packages, which lie in an environment of their own; run by "
NOT_RUN = {
    (
        "README.md",
        "make demo",
    ): "the demo is run by tests/e2e/test_demo.py, and the other line runs this test",
    ("CONTRIBUTING.md", "make setup"): "these make the environment that runs this test, and run it",
    ("CONTRIBUTING.md", ".venv/bin/python"): GPU,
    ("docs/client.md", 'client.push(model.state_dict(), version="step-100", transport="ipc")'): GPU,
    ("docs/client.md", "def merged"): OTHER_ENVIRONMENT
    + "tests/e2e/trl_scenario.py, which merges as TRL does",
    (
        "docs/client.md",
        "import torch.distributed as dist",
    ): "needs processes of a trainer; run, in parts, by tests/e2e/test_slices.py",
    (
        "docs/scale.md",
        'replicas.push("checkpoints/step-100"',
    ): "needs a server that joins late; run by tests/e2e/test_replicas.py",
    (
        "docs/scale.md",
        'fp8ext serve MODEL --speculative-config \'{"model"',
    ): "needs a second model; run by tests/e2e/test_speculative.py",
    ("docs/scale.md", "fp8ext serve MODEL --enable-lora"): "needs an adapter; run by tests/e2e/test_lora.py",
    (
        "docs/scale.md",
        "fp8ext serve MODEL --pipeline-parallel-size",
    ): "needs what vLLM lacks on a CPU; run by tests/e2e/test_pipeline_parallel.py",
    ("docs/scale.md", "fp8ext bench http"): GPU,
    ("docs/scale.md", "fp8ext push"): "needs several servers; run by tests/e2e/test_replicas.py",
    ("docs/scale.md", "fp8ext catch-up"): "needs a server that joins late; run by tests/e2e/test_replicas.py",
    (
        "docs/trainer-kit.md",
        "from transformers.modeling_utils",
    ): "needs a server with an FP8 KV cache; run by tests/trainer/test_kv_cache.py",
    (
        "docs/weight-updates.md",
        "from vllm_fp8ext.serve.client import changed_slices",
    ): "needs to know what is served; run by tests/e2e/test_slices.py",
    ("docs/compatibility.md", "scripts/check-vllm"): "downloads releases of vLLM",
    ("docs/http-api.md", 'curl --fail-with-body -sS -X POST -H "$AUTH" -H "$JSON" -d \'{"level"'): GPU,
    ("docs/kv-cache.md", "fp8ext calibrate"): "starts an engine; run by tests/e2e/test_calibrate.py",
    (
        "docs/loadtest.md",
        "fp8ext bench load",
    ): "takes eleven minutes; run, shorter, by tests/e2e/test_loadtest.py",
    ("docs/loadtest.md", "python benchmarks/load_compare.py"): GPU,
    ("docs/performance-method.md", "fp8ext bench kernels"): GPU,
    ("docs/quickstart.md", "cd vllm-fp8ext"): "the demo is run by tests/e2e/test_demo.py",
    ("docs/quickstart.md", "pip install ."): "tests/test_packaging.py says what it would install",
    ("docs/trainer-kit.md", "from vllm_fp8ext.trainer.correction import ICEPOP"): OTHER_ENVIRONMENT
    + "tests/trainer/test_trl_adapter.py",
    ("docs/trainer-kit.md", "fp8ext demo rl"): "takes an hour; run, shorter, by tests/e2e/test_demo_rl.py",
    ("docs/trainers.md", "from vllm_fp8ext.serve.adapters.vllm"): GPU
    + "; tests/e2e/test_native_ipc.py does without",
    ("docs/trainers.md", "GRPOConfig("): OTHER_ENVIRONMENT + "tests/e2e/test_trl_transfer.py",
    ("docs/trainers.md", "from vllm_fp8ext.serve.adapters.trl"): OTHER_ENVIRONMENT
    + "tests/e2e/test_trl.py, as examples/trl_grpo.py",
    ("docs/training.md", "VLLM_PLUGINS"): GPU + ": vLLM's CPU build does not sleep",
    ("docs/training.md", "for step in"): GPU,
    ("docs/weight-updates.md", "python benchmarks/update_prefill.py"): GPU,
    ("docs/weight-updates.md", "fp8ext bench update"): GPU,
    ("docs/weight-updates.md", "from vllm_fp8ext.serve.embedded import embedded\n"): GPU
    + "; tests/e2e/test_embedded.py does without",
    ("docs/weight-updates.md", "from vllm_fp8ext.serve.embedded import embedded_blocking"): GPU
    + "; tests/e2e/test_embedded.py does without",
    (
        "examples/grpo/README.md",
        "python examples/grpo/train.py",
    ): "trains for minutes; run, shorter, by tests/e2e/test_grpo_example.py",
    ("examples/tiny/README.md", "python examples/tiny/train.py"): "trains for minutes",
}
"""Why a block is not run, by page and by how the block begins. Its commands are parsed, its calls bound, all the same."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, and the line that it begins at."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_shell(self) -> bool:
        """Whether it holds commands."""
        return self.language in ("bash", "sh") or (not self.language and COMMAND.match(self.text) is not None)

    @property
    def serves(self) -> bool:
        """Whether one of its commands is a server."""
        return self.is_shell and any(
            words[:2] in (["vllm", "serve"], ["fp8ext", "serve"]) for _, words in commands(self.text)
        )

    @property
    def reason(self) -> str | None:
        """Why it is not run, or None."""
        reasons = [
            reason
            for (page, start), reason in NOT_RUN.items()
            if page == self.page and self.text.startswith(start)
        ]
        return reasons[0] if reasons else None


@cache
def blocks() -> tuple[Block, ...]:
    """Return every fenced block of the pages."""
    result = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start(2)) + 1
            result.append(Block(str(page.relative_to(PROJECT)), line, match[1], match[2]))
    return tuple(result)


@cache
def spans() -> tuple[tuple[str, str], ...]:
    """Return page and text of every command that stands within a sentence or a table."""
    result = set()
    for page in PAGES:
        for text in SPAN.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
            if COMMAND.match(text):
                result.add((str(page.relative_to(PROJECT)), text))
    return tuple(sorted(result))


def commands(script: str) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Yield the variables and the words of each simple command of a script, those within `$(…)` too."""
    pending = ""
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(f"{pending}{line}", posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:  # a quotation goes on
            pending = f"{pending}{line}\n"
            continue
        pending = ""
        yield from _simple(words)


def _simple(words: list[str]) -> Iterator[tuple[dict[str, str], list[str]]]:
    variables: dict[str, str] = {}
    command: list[str] = []
    rest = iter([*words, ";"])
    for word in rest:
        if set(word) & set("<>") and set(word) <= set("<>&"):
            next(rest)  # a file that the output goes to
        elif set(word) <= set("();|&"):
            if command:
                yield variables, command
            variables, command = {}, []
        elif not command and re.match(r"\w+=", word):
            name, _, value = word.partition("=")
            variables[name] = value
        elif command or word not in ("if", "then", "else", "fi", "do", "done", "!"):
            command.append(word)
