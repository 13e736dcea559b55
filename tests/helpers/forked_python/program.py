# SPDX-License-Identifier: Apache-2.0
"""The first seed of a test session, and what its programs do before their own code runs."""

import contextlib
import gc
import importlib
import multiprocessing
import os
import re
import socket
import sys
import types
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any

from forked_python.seed import Request, Seed, serve
from forked_python.spawning import fork_spawned

MODULES = (
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.cli.benchmark.main",
    "vllm.entrypoints.generate.api_router",
    "vllm.entrypoints.serve.instrumentator.metrics",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.model_executor.warmup.kernel_warmup",
    "vllm.renderers.hf",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.gpu.warmup",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu_worker",
    "vllm_fp8ext.compat.install",
    "vllm_fp8ext.compat.update.native_engines",
    "vllm_fp8ext.compat.update.worker",
    "vllm_fp8ext.demo.server",
    "vllm_fp8ext.layers.quantization",
    "vllm_fp8ext.register",
    "vllm_fp8ext.serve.native.mount",
    "vllm_fp8ext.serve.plugin",
)
"""Imported before anything is forked: what processes of vLLM import themselves, without plugins.

Not vLLM's worker for CPUs: importing it replaces `torch.cuda.Event`.
"""


def main(folder: str, descriptor: str) -> None:
    """Import, and serve the control socket of this number. `folder`: where this package was found."""
    sys.path.remove(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those who import them first would be told
        for name in MODULES:
            # another release of vLLM may lack one: programs import what they need
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        _look_for_features()
        _read_renamings()
    paths = [path for path in sys.path if path not in _paths_of(os.environ)]
    launched = dict(os.environ)
    gc.collect()
    gc.freeze()
    request, seed = serve(socket.socket(fileno=int(descriptor)))
    _settle(request, seed, paths, launched)
    run(request.arguments)


def _look_for_features() -> None:
    """Find out what this vLLM lacks: to read that much of it takes seconds, and every process of a server would."""
    from vllm_fp8ext.compat import features

    for name in features.features():
        features.reason_missing(name)
    features._installed.cache_clear()  # its syntax trees


def _read_renamings() -> None:
    """Have transformers compile the hundreds of expressions by which it renames tensors, which every rank asks for."""
    with contextlib.suppress(ImportError):
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("")


def run(arguments: Sequence[str]) -> None:
    """Run a program as Python does that was started with these arguments and `-P`."""
    first, *rest = arguments
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    code: Any
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        code = compile(rest[0], "<string>", "exec")
    elif first == "-m":
        spec, code = _module(rest[0])
        module.__spec__, module.__package__, module.__file__ = spec, spec.parent, spec.origin
        module.__loader__ = spec.loader
        sys.argv = [spec.origin or rest[0], *rest[1:]]
    else:
        sys.argv = [first, *rest]
        module.__file__ = first
        with open(first, "rb") as file:
            code = compile(file.read(), first, "exec")
    exec(code, module.__dict__)


def _module(name: str) -> tuple[ModuleSpec, Any]:
    spec = find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = find_spec(f"{name}.__main__")
    if spec is None:
        raise ImportError(f"No module named {name}")
    return spec, spec.loader.get_code(spec.name)  # type: ignore[union-attr]  # loaders of files have it


def _settle(request: Request, seed: Seed, paths: Sequence[str], launched: dict[str, str]) -> None:
    """Do what an interpreter does at its start, and have `multiprocessing` fork what it would spawn."""
    sys.path[:] = [*_paths_of(request.environment), *paths]
    importlib.invalidate_caches()
    if request.environment.get("PYTHONUNBUFFERED"):
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[attr-defined]  # text streams
    multiprocessing.current_process().authkey = os.urandom(32)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(int.from_bytes(os.urandom(4), "little"))
    _bind_threads(request.environment, launched)
    values = sys.modules.get("prometheus_client.values")
    if values is not None:  # it asks when it is imported whether it is one of several processes
        values.ValueClass = values.get_value_class()
    fork_spawned(seed)
    _fork_what_is_executed(seed)


def _paths_of(environment: Any) -> list[str]:
    return [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]


def _bind_threads(environment: dict[str, str], launched: dict[str, str]) -> None:
    """Take what OpenMP reads when it is loaded: threads, and the cores that they have."""
    count = environment.get("OMP_NUM_THREADS")
    if count and count != launched.get("OMP_NUM_THREADS"):
        sys.modules["torch"].set_num_threads(int(count))
    cores = environment.get("GOMP_CPU_AFFINITY") or environment.get("OMP_PLACES", "")
    if cores != (launched.get("GOMP_CPU_AFFINITY") or launched.get("OMP_PLACES", "")):
        os.sched_setaffinity(0, set(map(int, re.findall(r"\d+", cores))))


def _fork_what_is_executed(seed: Seed) -> None:
    """Fork servers, and the process in which vLLM looks at the class of a model that it does not know yet."""
    from forked_python import processes

    processes.fork_from(seed)

    def run(line: Sequence[str], **options: Any) -> Any:
        return processes.run([line[0], "-P", *line[1:]], **options)

    registry = sys.modules.get("vllm.model_executor.models.registry")
    if registry is not None:
        registry.subprocess = types.SimpleNamespace(run=run)  # type: ignore[attr-defined]  # all that it uses of it
    sys.modules["vllm_fp8ext.demo.server"].Server.popen = processes.Popen
