# SPDX-License-Identifier: Apache-2.0
"""Lets PyPI's build of torchvision, which is one for CUDA, be imported beside torch's build for CPUs.

Its compiled operators can't be loaded there, and it fails because two of them are not declared. They are declared here before
it is imported; nobody calls them to read images. Python imports this file first where its folder is on PYTHONPATH.
"""

import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

_BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _Declared(MetaPathFinder):
    """Finds nothing: declares operators when torchvision is about to be imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if not torch.cuda.is_available():
                self.library = torch.library.Library("torchvision", "DEF")
                self.library.define(f"nms{_BOXES}")
                self.library.define(f"qnms{_BOXES}")
                sys.modules["torchvision_declared"] = self  # type: ignore[assignment]  # else it is taken back


sys.meta_path.insert(0, _Declared())
sys.path.append(str(Path(sys.prefix) / "vision"))
