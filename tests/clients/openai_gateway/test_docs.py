from __future__ import annotations

import re
from http import HTTPStatus
from pathlib import Path

from clients.openai_gateway.fields_page import BEGIN, END, PAGE, written

import slotwise_gateway
from slotwise_gateway.config import Config


def test_the_page_has_the_table_of_the_code():
    """`python tests/clients/openai_gateway/fields_page.py` writes it anew."""
    page = PAGE.read_text()
    assert page.count(BEGIN) == page.count(END) == 1
    assert written(page) == page


def test_the_page_has_every_status_and_code_of_the_source():
    page = PAGE.read_text()
    folder = Path(slotwise_gateway.__file__).parent
    source = "\n".join(path.read_text() for path in sorted(folder.glob("*.py")))
    for name in set(re.findall(r"HTTPStatus\.([A-Z_]+)", source)) - {"METHOD_NOT_ALLOWED"}:
        assert f"\n| {HTTPStatus[name].value} |" in page, name
    for code in set(re.findall(r'code="(\w+)"', source)) - {"bad_request"}:
        assert f"`{code}`" in page, code


def test_defaults_that_the_page_names():
    page = PAGE.read_text()
    config = Config()
    assert f"`--grace` ({config.grace_s:g} s)" in page
    assert f"`--max-body-mb` ({config.limits.max_body_bytes >> 20})" in page
    assert f"every {config.keep_alive_s:g} s (`--keep-alive`)" in page
