"""The page to try a model with, and the document that it reads what can be asked from."""

from __future__ import annotations

import contextlib
import http.client
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.serving.browser import CHROMIUM, Browser, browser
from tests.serving.small_bundles import PICTURES, write_bundle
from tests.serving.test_server import Address, picture_spec, png, serving

TOKEN = "a-token-of-this-test"
in_a_browser = pytest.mark.skipif(not CHROMIUM, reason="there is no chromium here")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    """Of pictures; its page is open to all, the rest needs a token."""
    folder = tmp_path_factory.mktemp("page")
    bundle = write_bundle(folder / "bundle", task=PICTURES | {"pictures": picture_spec()})
    (folder / "token").write_text(TOKEN)
    with serving(str(bundle), "--page", "--token-file", str(folder / "token")) as address:
        yield address


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Browser]:
    with browser(tmp_path / "profile") as opened:
        yield opened
        assert not opened.complaints  # of its own policy, too


def test_the_page_may_do_nothing_but_ask_its_server(server: Address) -> None:
    status, content, headers = server.ask("GET", "/")
    html = content.decode()
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in headers["content-security-policy"]
    assert not re.findall(r"https?://|//[a-z]+\.|innerHTML|insertAdjacentHTML|document\.write", html)
    assert not re.findall(r"""\son[a-z]+="|\sstyle=""", html)  # which the policy would not run
    assert TOKEN not in html


def test_the_page_is_the_same_however_often_it_was_asked_for(server: Address) -> None:
    def headers() -> list[str]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port)) as connection:
            connection.request("GET", "/")
            return sorted(name for name, _ in connection.getresponse().getheaders())

    assert headers() == headers() and headers().count("hpml-release") == 1


def test_without_the_flag_there_is_no_page(tmp_path: Path) -> None:
    with serving(str(write_bundle(tmp_path / "bundle"))) as address:
        assert address.ask("GET", "/")[0] == 404
        assert "/v1/classify" not in address.ask("GET", "/openapi.json")[1]["paths"]


def test_the_document_names_what_this_model_answers(server: Address) -> None:
    assert server.ask("GET", "/openapi.json")[0] == 401
    told = server.ask("GET", "/openapi.json", headers={"Authorization": f"Bearer {TOKEN}"})[1]
    assert told["info"] == {"title": "small", "version": "1"}
    assert {"/v1/classify", "/v2/models/{name}/infer"} <= told["paths"].keys()
    assert "/v1/completions" not in told["paths"]
    infer = told["paths"]["/v2/models/{name}/infer"]["post"]["requestBody"]["content"]["application/json"]
    assert infer["schema"] == {"$ref": "#/components/schemas/InferBody"}
    assert infer["examples"]["small"]["value"]["inputs"][0]["shape"] == [1, 1, 4, 4]


def give_token(page: Browser, token: str) -> None:
    page.until("!document.querySelector('#access').hidden")
    page.value(f"document.querySelector('#token').value = '{token}'")
    page.value("document.querySelector('#access').requestSubmit()")


@in_a_browser
@pytest.mark.parametrize("width_px", [1100, 390])
def test_a_picture_is_named_in_a_browser(
    server: Address, page: Browser, tmp_path: Path, width_px: int
) -> None:
    png(np.random.default_rng(0).integers(0, 256, (4, 4), np.uint8), tmp_path)
    address = f"http://127.0.0.1:{server.port}/"
    page.open(address, width_px=width_px)
    give_token(page, "another-token-than-its")
    page.until("document.querySelector('#trouble').textContent == 'The server knows another token.'")
    give_token(page, TOKEN)
    page.until("!document.querySelector('#picture').hidden")
    assert page.value("document.querySelector('#access').hidden")
    page.choose("#drop input", tmp_path / "picture.png")
    page.until("document.querySelectorAll('#picture tr').length == 3")
    assert page.until("document.querySelector('#picture .time').textContent").endswith(
        " ms, network included"
    )
    shares = page.value("[...document.querySelectorAll('#picture tr')].map((row) => row.innerText).join()")
    assert all(name in shares for name in "abc")
    assert "%" in shares
    assert page.value("document.documentElement.scrollWidth") <= width_px
    assert all(url.startswith((address, "data:,", "blob:")) for url in page.urls)
    page.complaints = [one for one in page.complaints if "401" not in one]  # the browser's, of two tokens


@in_a_browser
def test_inputs_are_asked_for_as_json_where_a_task_has_no_words(tmp_path: Path, page: Browser) -> None:
    with serving(str(write_bundle(tmp_path / "bundle")), "--page") as address:
        page.open(f"http://127.0.0.1:{address.port}/", width_px=390)
        page.until("!document.querySelector('#inputs').hidden")
        page.value("document.querySelector('#inputs form').requestSubmit()")
        told = page.until("document.querySelector('#inputs pre').textContent")
        assert '"logits"' in told
        page.value("document.querySelector('#inputs textarea').value = '<b>{'")
        page.value("document.querySelector('#inputs form').requestSubmit()")
        assert "not JSON" in page.until("document.querySelector('#trouble').textContent")
        page.complaints.clear()  # the browser's, of the 400


PROCESSING = """\
import numpy as np


def preprocess(raw, facts):
    return {"x_nchw": np.full((1, 1, 4, 4), raw["brightness"], np.float32)}


def postprocess(outputs, facts):
    return {"largest": int(outputs["logits"].argmax())}
"""


@in_a_browser
def test_a_task_of_ones_own_is_asked_in_its_words(tmp_path: Path, page: Browser) -> None:
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "processing.py").write_text(PROCESSING)
    bundle = write_bundle(tmp_path / "bundle", task={"task": "mine:Task"})
    with serving(str(bundle), "--page", "--run-code") as address:
        page.open(f"http://127.0.0.1:{address.port}/", width_px=390)
        page.until("!document.querySelector('#inputs').hidden")
        page.value("document.querySelector('#inputs textarea').value = '{\"brightness\": 1}'")
        page.value("document.querySelector('#inputs form').requestSubmit()")
        assert '"largest": ' in page.until("document.querySelector('#inputs pre').textContent")
