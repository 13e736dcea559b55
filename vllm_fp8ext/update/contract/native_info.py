# SPDX-License-Identifier: Apache-2.0
"""`init_info` and `update_info` of vLLM's weight transfer, as plain data that is checked. Needs neither torch nor vLLM."""

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.manifest import CODES_DTYPE, DTYPES, TensorSpec
from vllm_fp8ext.update.contract.update_errors import refusal

BUCKET_BYTES = 1 << 30
"""Default of vLLM's `packed_buffer_size_bytes`."""
MOST_BUCKET_BYTES = 1 << 34
NCCL_ID_BYTES = 128
ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8", CODES_DTYPE, "float8_e5m2", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("bfloat16", "float16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64"), 8),
}
"""Bytes of an element, by torch's name of its dtype: what comes in another can't be measured."""
_VERSION = re.compile(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029]{1,256}")
_NAME = re.compile(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029]{1,512}")
_MOST_EXTENT = 1 << 48


@dataclass(frozen=True, kw_only=True)
class NcclInit:
    """vLLM's `NCCLWeightTransferInitInfo`.

    Rank 0 of a group of `world_size` is found by the TCP store at `master_address` and `master_port`, or by
    `nccl_unique_id_b64`. The server's own rank 0 is `rank_offset` there. `packed`: tensors come in buckets of about
    `packed_buffer_size_bytes`, else one by one.
    """

    rank_offset: int
    world_size: int
    master_address: str | None = None
    master_port: int | None = None
    nccl_unique_id_b64: str | None = None
    packed: bool = False
    packed_buffer_size_bytes: int = BUCKET_BYTES
    packed_num_buffers: int = 2

    @property
    def bucket_bytes(self) -> int | None:
        """Bytes beyond which a bucket ends, or None where tensors come one by one."""
        return self.packed_buffer_size_bytes if self.packed else None


@dataclass(frozen=True, kw_only=True)
class IpcInit:
    """vLLM's `IPCWeightTransferInitInfo`; `packed`: the tensors of a call lie in one buffer."""

    packed: bool = False


@dataclass(frozen=True, kw_only=True)
class Announced:
    """Tensors that one `update_weights` brings, under the names that the trainer gives them.

    `wire`: fields of the call beside names, dtypes and shapes.
    """

    specs: list[TensorSpec]
    wire: dict[str, Any]


def nccl_init(info: Any, world_size: int) -> NcclInit:
    """Check the `init_info` of the backend `nccl` for a server of `world_size` ranks.

    Raises:
        UpdateError: `invalid-request`.
    """
    values = _known(info, NcclInit, "init_info")
    for name in ("rank_offset", "world_size"):
        if name not in values:
            raise invalid(f"init_info: expected {name}, found {_listed(values)}")
    _require_types(values, {"packed": bool, "master_address": str, "nccl_unique_id_b64": str}, "init_info")
    _require_range(values, "rank_offset", 1, 1 << 20)
    _require_range(values, "world_size", 2, 1 << 20)
    _require_range(values, "master_port", 1, 65_535)
    _require_range(values, "packed_buffer_size_bytes", 1, MOST_BUCKET_BYTES)
    _require_range(values, "packed_num_buffers", 1, 64)
    init = NcclInit(**values)
    last = init.rank_offset + world_size - 1
    if last >= init.world_size:
        raise invalid(
            f"init_info: this server has {world_size} ranks, {init.rank_offset} to {last} of the group: expected world_size "
            f"{last + 1} or more, found {init.world_size}"
        )
    _require_rendezvous(init)
    return init


def _require_rendezvous(init: NcclInit) -> None:
    store = init.master_address is not None and init.master_port is not None
    if init.nccl_unique_id_b64 is None:
        if not store:
            raise invalid(
                "init_info: expected master_address and master_port, or nccl_unique_id_b64, found "
                f"master_address={init.master_address!r}, master_port={init.master_port!r}"
            )
        return
    if init.master_address is not None or init.master_port is not None:
        raise invalid("init_info: expected master_address and master_port or nccl_unique_id_b64, found both")
    try:
        size = len(base64.b64decode(init.nccl_unique_id_b64, validate=True))
    except (binascii.Error, ValueError):
        size = 0
    if size != NCCL_ID_BYTES:
        raise invalid(f"init_info: expected nccl_unique_id_b64 of {NCCL_ID_BYTES} bytes in standard base64")


def ipc_init(info: Any) -> IpcInit:
    """Check the `init_info` of the backend `ipc`.

    Raises:
        UpdateError: `invalid-request`.
    """
    values = _known(info, IpcInit, "init_info")
    _require_types(values, {"packed": bool}, "init_info")
    return IpcInit(**values)


def announced(info: Any) -> Announced:
    """Check what every `update_info` has: `names`, `dtype_names` and `shapes`, of the same length.

    Raises:
        UpdateError: `invalid-request`, or `wrong-dtype` for a dtype that torch does not have.
    """
    if not isinstance(info, Mapping):
        raise invalid(f"update_info: expected an object, found {_shown(info)}")
    names, dtypes, shapes = (_list(info, name) for name in ("names", "dtype_names", "shapes"))
    for name, values in (("dtype_names", dtypes), ("shapes", shapes)):
        if len(values) != len(names):
            raise invalid(f"update_info: expected {len(names)} {name}, as many as names, found {len(values)}")
    for name in names:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise invalid(
                f"update_info: expected names of 1 to 512 characters without control characters, found {_shown(name)}"
            )
    unknown = [
        {"kind": "wrong-dtype", "tensor": name, "expected": list(DTYPES), "found": _shown(dtype)}
        for name, dtype in zip(names, dtypes, strict=True)
        if not isinstance(dtype, str) or dtype not in ITEM_BYTES
    ]
    if unknown:
        raise refusal(unknown)
    specs = [
        TensorSpec(name, _shape(name, shape), dtype)
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
    ]
    wire = {key: value for key, value in info.items() if key not in ("names", "dtype_names", "shapes")}
    return Announced(specs=specs, wire=wire)


def own_part(info: Any, world_size: int) -> Any:
    """Return one `update_info` of a list with one for each rank, all equal.

    Raises:
        UpdateError: `invalid-request`.
    """
    if not isinstance(info, list):
        return info
    if len(info) != world_size:
        raise invalid(
            f"update_info: expected {world_size} of them, one for each rank, or one, found {len(info)}"
        )
    if any(part != info[0] for part in info):
        raise invalid("update_info: expected the same for every rank, which receive the same, found others")
    return info[0]


def require_version(version: Any) -> str:
    """Return a `weight_version` that an update may have.

    Raises:
        UpdateError: `invalid-request`.
    """
    if not isinstance(version, str) or not _VERSION.fullmatch(version):
        raise invalid(
            f"weight_version: expected 1 to 256 characters, none of them a control character, found {_shown(version)}"
        )
    return version


def spec_bytes(spec: TensorSpec) -> int:
    """Return the bytes of a tensor's elements, one after the other."""
    size = ITEM_BYTES[spec.dtype]
    for extent in spec.shape:
        size *= extent
    return size


def invalid(message: str) -> UpdateError:
    """Make the error of a call that can't be understood."""
    return UpdateError("invalid-request", message, status=422)


def require_wire(wire: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise `UpdateError` (`invalid-request`) for a field of `update_info` that its backend does not have."""
    unknown = sorted(set(wire) - set(known))
    if unknown:
        expected = ", ".join(("names", "dtype_names", "shapes", *known))
        raise invalid(f"update_info: expected {expected}, found {', '.join(map(repr, unknown))}")


def _known(info: Any, kind: type[Any], what: str) -> dict[str, Any]:
    """Return the fields of `info` that are not null, all of which `kind` must have."""
    if not isinstance(info, Mapping):
        raise invalid(f"{what}: expected an object, found {_shown(info)}")
    expected = [field.name for field in fields(kind)]
    unknown = sorted(map(str, set(info) - set(expected)))
    if unknown:
        raise invalid(f"{what}: expected {', '.join(expected)}, found {_listed(unknown)}")
    return {name: value for name, value in info.items() if value is not None}


def _require_types(values: Mapping[str, Any], types: Mapping[str, type], what: str) -> None:
    for name, kind in types.items():
        if name in values and not isinstance(values[name], kind):
            raise invalid(f"{what}: {name}: expected {kind.__name__}, found {_shown(values[name])}")


def _require_range(values: Mapping[str, Any], name: str, least: int, most: int) -> None:
    value = values.get(name, least)
    if type(value) is not int or not least <= value <= most:
        raise invalid(f"init_info: {name}: expected {least} to {most}, found {_shown(value)}")


def _list(info: Mapping[str, Any], name: str) -> list[Any]:
    value = info.get(name)
    if not isinstance(value, list):
        raise invalid(f"update_info: expected a list of {name}, found {_shown(value)}")
    return value


def _shape(name: str, shape: Any) -> tuple[int, ...]:
    extents = shape if isinstance(shape, list | tuple) else None
    good = extents is not None and len(extents) <= 64
    size = 1
    for extent in extents or ():
        good = good and type(extent) is int and extent >= 0
        size *= extent if good else 1
    if not good or size > _MOST_EXTENT:
        raise invalid(f"update_info: tensor {name}: expected a shape, found {_shown(shape)}")
    assert extents is not None
    return tuple(extents)


def _listed(names: Any) -> str:
    return ", ".join(sorted(map(str, names)))[:300] or "none"


def _shown(value: Any) -> str:
    return repr(value)[:200]
