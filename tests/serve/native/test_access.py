# SPDX-License-Identifier: Apache-2.0
"""Who may call vLLM's own weight routes."""

import base64
import logging

import pytest
from starlette.requests import HTTPConnection

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.auth import AdminKey, basic_password
from vllm_fp8ext.serve.native.access import NativeAccess


def connection(host: str | None = "127.0.0.1", **headers: str) -> HTTPConnection:
    listed = [(name.replace("_", "-").lower().encode(), value.encode()) for name, value in headers.items()]
    client = (host, 1234) if host else None
    return HTTPConnection({"type": "http", "headers": listed, "client": client})


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"x:{password}".encode()).decode()


def refusal(access: NativeAccess, caller: HTTPConnection) -> str | None:
    try:
        access.check(caller)
    except UpdateError as error:
        return error.kind
    return None


@pytest.mark.parametrize(
    ("authorization", "kind"),
    [
        ("Bearer secret", None),
        (basic("secret"), None),
        ("Bearer other", "wrong-key"),
        (basic("other"), "wrong-key"),
        ("Basic ***", "no-key"),
        (None, "no-key"),
    ],
)
def test_the_key_as_a_header_or_in_a_url(authorization: str | None, kind: str | None) -> None:
    headers = {} if authorization is None else {"authorization": authorization}
    assert refusal(NativeAccess(AdminKey("secret")), connection(**headers)) == kind


@pytest.mark.parametrize(
    ("host", "kind"),
    [
        ("127.0.0.1", None),
        ("10.1.2.3", None),
        ("::ffff:10.1.2.3", None),
        ("11.0.0.1", "no-key"),
        (None, "no-key"),
    ],
)
def test_trusted_addresses_need_no_key(
    host: str | None, kind: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    access = NativeAccess(AdminKey("secret"))
    assert refusal(access, connection(host)) == "no-key"
    with caplog.at_level(logging.WARNING, logger="vllm.fp8ext"):
        access.trust(["127.0.0.1/32", "10.0.0.0/8"])
    assert refusal(access, connection(host)) == kind


@pytest.mark.parametrize("header", ["forwarded", "x_forwarded_for", "X_Forwarded_Host", "via", "origin"])
def test_nobody_is_trusted_behind_a_proxy_or_in_a_browser(header: str) -> None:
    access = NativeAccess(AdminKey("secret"))
    access.trust(["127.0.0.1"])
    assert refusal(access, connection(**{header: "1.2.3.4"})) == "not-trusted"
    assert refusal(access, connection(**{header: "1.2.3.4", "authorization": "Bearer secret"})) is None


def test_a_wrong_key_from_a_trusted_address_is_wrong() -> None:
    access = NativeAccess(AdminKey("secret"))
    access.trust(["127.0.0.1"])
    assert refusal(access, connection(authorization="Bearer other")) == "wrong-key"


def test_without_a_key_nobody_may() -> None:
    assert refusal(NativeAccess(None), connection(authorization="Bearer ")) == "not-trusted"


def test_the_password_of_a_header() -> None:
    assert basic_password(basic("a:b")) == "a:b"
    assert basic_password("Bearer x") is None
    assert basic_password("Basic " + base64.b64encode(b"alone").decode()) is None
