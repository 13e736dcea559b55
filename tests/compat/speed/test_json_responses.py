# SPDX-License-Identifier: Apache-2.0
"""JSON of answers against what Starlette makes of them."""

import json
from importlib import import_module
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import JSONResponse

from vllm_fp8ext.compat.speed import json_responses
from vllm_fp8ext.compat.speed.json_responses import ROUTERS, FastJSONResponse

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**62), 2**62)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner), max_leaves=30)


@given(VALUES)
def test_values_are_the_same(value: Any) -> None:
    assert json.loads(FastJSONResponse(value).body) == json.loads(JSONResponse(value).body)


def test_a_text_with_the_name_of_a_number_is_a_text() -> None:
    assert FastJSONResponse({"text": "NaN ä"}).body == JSONResponse({"text": "NaN ä"}).body


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), object(), "\ud800"], ids=["nan", "inf", "object", "surrogate"]
)
def test_what_starlette_refuses_is_refused(value: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        JSONResponse([value])
    with pytest.raises((ValueError, TypeError)):
        FastJSONResponse([value])


def test_the_routes_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ROUTERS:
        monkeypatch.setattr(import_module(name), "JSONResponse", JSONResponse)
    json_responses.install()
    assert all(import_module(name).JSONResponse is FastJSONResponse for name in ROUTERS)
