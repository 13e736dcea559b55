# SPDX-License-Identifier: Apache-2.0
"""The command and the environment of `fp8ext serve`."""

import sys
import tempfile
from pathlib import Path

import pytest

from vllm_fp8ext.environment import ADMIN_KEY
from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.serve.launch import command, environment, require_valid

START = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve", "org/model"]
"""`-P`, so that the working directory's folders (`kernels`, say) shadow no package."""
GRACE = ["--shutdown-timeout", "5"]


@pytest.fixture(autouse=True)
def runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_blockfp8_unless_something_else_is_chosen() -> None:
    usual = [*START, "--quantization", "blockfp8", *GRACE]
    assert command("org/model", []) == usual
    assert command("org/model", ["--port", "1"]) == [*usual, "--port", "1"]


@pytest.mark.parametrize(
    "chosen", [["--quantization", "fp8"], ["--quantization=fp8"], ["-q", "fp8"], ["-q=fp8"]]
)
def test_a_chosen_quantization_stays(chosen: list[str]) -> None:
    assert command("org/model", ["--port", "1", *chosen]) == [*START, *GRACE, "--port", "1", *chosen]


@pytest.mark.parametrize(
    "chosen", [["--shutdown-timeout", "0"], ["--shutdown_timeout=60"], ["--config", "file.yaml"]]
)
def test_a_chosen_grace_period_stays(chosen: list[str]) -> None:
    """A file of vLLM's options may choose it, too."""
    assert command("org/model", chosen) == [*START, "--quantization", "blockfp8", *chosen]


def test_similar_arguments_are_no_choice() -> None:
    assert "blockfp8" in command("org/model", ["--quantization-param-path", "x"])


@pytest.mark.parametrize(
    "form", ["--additional-config {}", "--additional-config={}", "--additional_config {}"]
)
def test_settings_are_looked_at_before_vllm_is_started(form: str) -> None:
    valid, misspelt = '{"fp8ext":{"staging":"none"},"other":1}', '{"fp8ext":{"stagng":"="}}'
    require_valid(["--port", "1", *form.format(valid).split()])
    with pytest.raises(ConfigError, match="stagng: unknown key; the keys are allowed_dirs"):
        require_valid(["--port", "1", *form.format(misspelt).split()])


@pytest.mark.parametrize("text", ["{", "[1]", "1"])
def test_what_is_no_object_is_left_to_vllm(text: str) -> None:
    require_valid(["--additional-config", text])
    require_valid(["--additional-config"])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, "fp8ext"),
        ("", "fp8ext"),
        ("other", "other,fp8ext"),
        ("fp8ext", "fp8ext"),
        ("a,,fp8ext,b", "a,fp8ext,b"),
    ],
)
def test_the_plugin_is_allowed_beside_others(before: str | None, after: str) -> None:
    base = {ADMIN_KEY: "secret", **({} if before is None else {"VLLM_PLUGINS": before})}
    assert environment(base) == ({ADMIN_KEY: "secret", "VLLM_PLUGINS": after}, None)


def test_the_rest_of_the_environment_stays_and_the_given_one_is_not_changed() -> None:
    base = {"PATH": "/bin", ADMIN_KEY: "secret"}
    assert environment(base)[0] == {"PATH": "/bin", ADMIN_KEY: "secret", "VLLM_PLUGINS": "fp8ext"}
    assert base == {"PATH": "/bin", ADMIN_KEY: "secret"}


@pytest.mark.parametrize("base", [{}, {ADMIN_KEY: ""}])
def test_a_missing_key_is_made_and_kept_where_only_the_user_reads_it(
    base: dict[str, str], runtime_dir: Path
) -> None:
    env, file = environment(base)
    assert file is not None
    assert file.parent == runtime_dir
    assert file.read_text() == env[ADMIN_KEY] + "\n"
    assert file.stat().st_mode & 0o777 == 0o600
    assert len(env[ADMIN_KEY]) >= 32
    assert environment(base)[0][ADMIN_KEY] != env[ADMIN_KEY]


def test_a_key_that_nobody_could_send_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"{ADMIN_KEY}: expected a key of printable ASCII characters"):
        environment({ADMIN_KEY: "schlüssel"})


def test_a_key_is_kept_elsewhere_where_the_session_has_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "not there"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    _, file = environment({})
    assert file is not None
    assert file.parent == tmp_path
