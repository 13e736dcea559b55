# SPDX-License-Identifier: Apache-2.0
"""Results of an engine with one tensor, for tests of what reads them."""

from typing import Any

from vllm_fp8ext.update.contract.results import EngineStatus, UpdateState
from vllm_fp8ext.update.engine.totals import Totals


def update_state(**fields: Any) -> UpdateState:
    """An open update."""
    known = {
        "id": "u",
        "state": "open",
        "version": "v",
        "running": "keep",
        "base_epoch": None,
        "opened_at": 0.0,
        "expires_at": None,
        "partial": False,
        "world_size": 1,
        "tensors_required": 1,
        "tensors_missing": 0,
        "missing": [],
        "bytes": 0,
        "chunks": {},
        "problems": [],
        "problem_count": 0,
        "seconds": {},
        "quantization_error": None,
        "canary_perplexity": None,
        "kv_scales": None,
        "result": None,
    }
    return UpdateState(**{**known, **fields})


def engine_status(**fields: Any) -> EngineStatus:
    """An engine that serves its first weights."""
    known = {
        "epoch": 0,
        "version": "epoch-0",
        "instance": "abc",
        "state": "serving",
        "poisoned": None,
        "update": None,
        "previous_version": None,
        "previous_epoch": None,
        "scale_format": "fp32",
        "kv_scales": None,
        "kv_layers": {},
        "kv_traffic": {},
        "kv_cache_dtype": "auto",
        "staging": "shadow",
        "stall_seconds": None,
        "compiled": [],
        "twin_bytes": [0],
        "twin_kv_blocks": 0,
        "last_update": None,
        "totals": Totals().as_dict(),
    }
    return EngineStatus(**{**known, **fields})
