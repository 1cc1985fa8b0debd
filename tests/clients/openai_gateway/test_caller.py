from __future__ import annotations

import pytest

from slotwise_gateway.caller import caller_token, request_id
from slotwise_gateway.errors import ApiError


def scope(*headers: tuple[bytes, bytes]):
    return {"headers": list(headers)}


@pytest.mark.parametrize(
    ("headers", "token"),
    [
        ([], None),
        ([(b"authorization", b"Bearer abc")], "abc"),
        ([(b"authorization", b"bearer  abc ")], "abc"),
        ([(b"authorization", b"Bearer ")], None),
        ([(b"authorization", b"Bearer")], None),
    ],
)
def test_tokens(headers, token):
    assert caller_token(scope(*headers)) == token


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"Basic abc")],
        [(b"authorization", b"abc")],
        [(b"authorization", b"Bearer a b")],
        [(b"authorization", b"Bearer \xff")],
        [(b"authorization", b"Bearer " + b"a" * 5000)],
        [(b"authorization", b"Bearer a"), (b"authorization", b"Bearer b")],
    ],
)
def test_what_is_no_token(headers):
    with pytest.raises(ApiError) as raised:
        caller_token(scope(*headers))
    assert (raised.value.status, raised.value.code) == (401, "invalid_api_key")
    assert raised.value.headers == {"WWW-Authenticate": "Bearer"}


@pytest.mark.parametrize("given", [b"a", b"my request 7", b"x" * 120, b'{"a"}'])
def test_a_good_name_of_the_caller_stays(given):
    assert request_id(scope((b"x-request-id", given))) == given.decode()


@pytest.mark.parametrize("given", [b"", b" ", b"x" * 121, b"\xc3\xa9", b"a\x7f"])
def test_other_names_are_replaced(given):
    made = request_id(scope((b"x-request-id", given)))
    assert len(made) == 32
    assert made != request_id(scope())
