# SPDX-License-Identifier: Apache-2.0
"""vLLM's own weight transfer by CUDA IPC, as a rival: the requests that its trainer engine sends
(`vllm/distributed/weight_transfer/ipc_engine.py`), with generation paused around them as its documentation asks."""

import base64
import json
import pickle
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vllm_fp8ext.loadtest.vllm_dev_routes import VllmDevRoutes

SERVE = ("--weight-transfer-config", json.dumps({"backend": "ipc"}))
"""Arguments of `vllm serve`."""
VARIABLES = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
"""Handles come pickled."""


class Native:
    """A trainer whose tensors lie on the GPU of the server at `url`."""

    def __init__(self, url: str) -> None:
        self._routes = VllmDevRoutes(url)
        self._routes.call("/init_weight_transfer_engine", json={"init_info": {"packed": False}})

    def push(self, tensors: Mapping[str, Tensor]) -> None:
        """Pause, hand over, reset the prefix cache, resume.

        Raises:
            httpx.HTTPError: the server refused.
        """
        with self._routes.paused():
            self._routes.call("/start_weight_update")
            self._routes.call("/update_weights", json={"update_info": _handles(tensors)})
            self._routes.call("/finish_weight_update")


def _handles(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    handles = [{gpu: reduce_tensor(tensor)[1]} for tensor in tensors.values()]
    return {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode(),
    }
