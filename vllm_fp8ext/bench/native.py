# SPDX-License-Identifier: Apache-2.0
"""vLLM's own weight transfer by CUDA IPC, as a rival: the requests that its trainer engine sends
(`vllm/distributed/weight_transfer/ipc_engine.py`), with generation paused around them as its documentation asks."""

import base64
import json
import pickle
from collections.abc import Mapping
from typing import Any

import httpx
from torch import Tensor

SERVE = ("--weight-transfer-config", json.dumps({"backend": "ipc"}))
"""What `vllm serve` is told."""
VARIABLES = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
"""Handles come pickled."""


class Native:
    """A trainer whose tensors lie on the GPU of the server at `url`."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=600)
        self._call("/init_weight_transfer_engine", json={"init_info": {"packed": False}})

    def push(self, tensors: Mapping[str, Tensor]) -> None:
        """Pause, hand over, reset the prefix cache, resume.

        Raises:
            httpx.HTTPError: the server refused.
        """
        self._call("/pause", params={"mode": "keep", "clear_cache": "false"})
        try:
            self._call("/start_weight_update")
            self._call("/update_weights", json={"update_info": _handles(tensors)})
            self._call("/finish_weight_update")
            self._call("/reset_prefix_cache")
        finally:
            self._call("/resume")

    def _call(self, path: str, **arguments: Any) -> None:
        self._http.post(path, **arguments).raise_for_status()


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
