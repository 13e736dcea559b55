# SPDX-License-Identifier: Apache-2.0
"""Modules of this folder as vLLM plugins of a server."""

import os
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent


def variables(folder: Path, *more: str, ranks: int = 1, beside: Sequence[str] = ()) -> dict[str, str]:
    """The environment of a server, or of an engine, that loads `fp8ext_short_spin`, and the modules `more`, in each of its
    processes, from a distribution that is written below `folder`. Two ranks get one core each. `beside`: more modules that
    can be imported there."""
    modules = ("fp8ext_short_spin", *more)
    path = folder / "-".join(modules)
    metadata = path / "fp8ext_tests-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: fp8ext-tests\nVersion: 0\n")
    entries = "".join(f"{module} = {module}:register\n" for module in modules)
    (metadata / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{entries}")
    for module in (*modules, *beside):
        (path / f"{module}.py").write_bytes((HERE / f"{module}.py").read_bytes())
    paths = [str(path), os.environ.get("PYTHONPATH")]
    variables_set = {
        "VLLM_PLUGINS": ",".join(("fp8ext", *modules)),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    return variables_set if ranks == 1 else {**variables_set, "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
