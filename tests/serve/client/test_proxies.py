# SPDX-License-Identifier: Apache-2.0
"""Which proxy a call goes through, what happens where that is not there, and who is named."""

import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from vllm_fp8ext.errors import ConfigError, UpdateError
from vllm_fp8ext.serve.client.proxies import Proxies
from vllm_fp8ext.serve.schema import PREFIX

from .conftest import Caller
from .server import Server

VARIABLES = [
    name
    for scheme in ("http", "https", "all", "no")
    for name in (f"{scheme}_proxy", f"{scheme}_PROXY".upper())
]


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


class Proxy(ThreadingHTTPServer):
    """A forward proxy, which notes what it is asked for. `broken`: it answers itself, with 502."""

    broken = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Forward)
        self.asked: list[str] = []
        self.authorization: list[str | None] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Forward(BaseHTTPRequestHandler):
    server: Proxy

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        self.server.authorization.append(self.headers["Proxy-Authorization"])
        if self.server.broken:
            self.send_error(502, "no way there")
            return
        answer = httpx.get(
            self.path, headers={"Authorization": self.headers["Authorization"]}, trust_env=False
        )
        self.send_response(answer.status_code)
        self.send_header("Content-Type", answer.headers["content-type"])
        self.send_header("Content-Length", str(len(answer.content)))
        self.end_headers()
        self.wfile.write(answer.content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with Proxy() as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield serving
        serving.shutdown()
        thread.join()


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address of this machine at which nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_calls_go_through_the_proxy(
    caller: Caller, server: Server, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, proxy.url.replace("//", "//user:pass@"))
    caller(server.url, "weights")
    assert proxy.asked == [f"{server.url}{PREFIX}/weights"]
    assert proxy.authorization == ["Basic dXNlcjpwYXNz"]


@pytest.mark.parametrize(
    "exempt",
    [
        "127.0.0.1,fd00::/8",
        "[::1],127.0.0.1",
        "fd00::/8, 127.0.0.0/8",
        "::1 127.0.0.1",
        "*",
        "[fd00::]/8,*",
        "http://127.0.0.1",
    ],
)
def test_what_no_proxy_names_is_reached_directly(
    caller: Caller, server: Server, nobody: str, monkeypatch: pytest.MonkeyPatch, exempt: str
) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://{nobody}")
    monkeypatch.setenv("ALL_PROXY", "socks5://nowhere:1")
    monkeypatch.setenv("NO_PROXY", exempt)
    caller(server.url, "weights")


def test_a_dead_proxy_is_named_not_the_server(
    caller: Caller, server: Server, nobody: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://user:pass@{nobody}")
    with pytest.raises(
        httpx.ConnectError, match=rf"through the proxy http://{nobody} \(of HTTP_PROXY\)"
    ) as caught:
        caller(server.url, "weights", retries=0)
    assert "pass" not in str(caught.value)
    assert str(caught.value.request.url) == f"{server.url}{PREFIX}/weights"


def test_an_answer_of_the_proxys_own_names_it(
    caller: Caller, server: Server, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.broken = True
    monkeypatch.setenv("ALL_PROXY", proxy.url.removeprefix("http://"))
    with pytest.raises(
        UpdateError, match=rf"HTTP 502 from .* through the proxy {proxy.url} \(of ALL_PROXY\)"
    ):
        caller(server.url, "weights", retries=0)


def test_a_socks_proxy_without_its_package_is_a_setting_that_cannot_be_served(
    caller: Caller, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "socksio", None)
    monkeypatch.setenv("ALL_PROXY", "socks5://user:pass@proxy:1080")
    with pytest.raises(
        ConfigError, match=r"socks5://proxy:1080 \(of ALL_PROXY\), needs the package socksio"
    ) as caught:
        caller(server.url, "weights")
    assert "pass" not in str(caught.value)


@pytest.mark.parametrize("value", ["ftp://proxy:1", "http://proxy:port", "http://[::1", "proxy:port"])
def test_a_proxy_that_cannot_be_one_is_named(
    caller: Caller, server: Server, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("HTTP_PROXY", value)
    with pytest.raises(
        ConfigError, match=r"expected a proxy such as http://proxy:3128, found .* \(of HTTP_PROXY\)"
    ):
        caller(server.url, "weights")


@pytest.mark.parametrize(
    ("exempt", "url", "direct"),
    [
        ("rollout", "http://rollout:8000", True),
        ("ROLLOUT", "http://rollout:8000", True),
        ("rollout", "http://a.rollout", True),
        ("rollout", "http://arollout", False),
        (".local", "http://rollout.local", True),
        ("*.local", "http://rollout.local", True),
        (".local", "http://local", False),
        ("rollout:8000", "http://rollout:8000", True),
        ("rollout:8000", "http://rollout:8001", False),
        ("rollout:80", "http://rollout", True),
        ("https://rollout", "http://rollout", False),
        ("http://rollout:8000/", "http://rollout:8000", True),
        ("all://rollout", "http://rollout", True),
        ("10.0.0.0/8", "http://10.1.2.3:8000", True),
        ("10.0.0.0/8", "http://11.1.2.3:8000", False),
        ("10.0.0.0/8", "http://rollout", False),
        ("10.0.0.1", "http://10.0.0.1", True),
        ("10.0.0.1", "http://10.0.0.10", False),
        ("0.0.1", "http://10.0.0.1", False),
        ("fd00::/8", "http://[fd12::1]:8000", True),
        ("fd00::/8", "http://[fe80::1]:8000", False),
        ("fd00::/8", "http://10.0.0.1", False),
        ("::1", "http://[::1]:8000", True),
        ("[::1]", "http://[::1]:8000", True),
        ("[::1]:8000", "http://[::1]:8000", True),
        ("[::1]:8001", "http://[::1]:8000", False),
        ("0:0:0:0:0:0:0:1", "http://[::1]", True),
        ("", "http://rollout", False),
        (" , ,", "http://rollout", False),
    ],
)
def test_entries_of_no_proxy(monkeypatch: pytest.MonkeyPatch, exempt: str, url: str, direct: bool) -> None:
    monkeypatch.setenv("http_proxy", "proxy:3128")
    monkeypatch.setenv("no_proxy", exempt)
    result = Proxies.of_environment().of(httpx.URL(url))
    assert (str(result) if result else None) == (None if direct else "http://proxy:3128 (of http_proxy)")


def test_the_scheme_of_the_server_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://a")
    monkeypatch.setenv("ALL_PROXY", "http://b")
    proxies = Proxies.of_environment()
    result = [str(proxies.of(httpx.URL(url))) for url in ("https://rollout", "http://rollout")]
    assert result == ["http://a (of HTTPS_PROXY)", "http://b (of ALL_PROXY)"]
