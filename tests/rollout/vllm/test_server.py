"""The messages between the two processes, and what is read from them."""

import math
import socket
import threading
from array import array

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evo_grpo.rollout.vllm.server import Row, probe_gap, receive, rows_of, send

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
NUMBERS = {
    "b": st.integers(-128, 127),
    "i": st.integers(-(2**31), 2**31 - 1),
    "q": st.integers(-(2**63), 2**63 - 1),
    "f": st.floats(width=32),
}
ARRAYS = st.sampled_from(sorted(NUMBERS)).flatmap(
    lambda kind: st.lists(NUMBERS[kind], max_size=50).map(lambda values: array(kind, values))
)


@pytest.fixture
def link():
    """Both ends of a socket, as files."""
    pair = socket.socketpair()
    one, other = (end.makefile("rwb") for end in pair)
    for end in pair:
        end.close()
    with one, other:
        yield one, other


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(message=st.dictionaries(st.text(max_size=5), PLAIN | ARRAYS, max_size=4))
def test_a_message_arrives_as_it_was_sent(link, message):
    one, other = link
    send(one, message)
    send(one, {"second": True})
    got = receive(other)
    assert list(got) == list(message)
    for name, sent in message.items():
        if isinstance(sent, array):
            assert got[name].typecode == sent.typecode
            assert got[name].tobytes() == sent.tobytes()  # NaN too
        else:
            assert got[name] == sent
    assert receive(other) == {"second": True}


def test_a_message_larger_than_any_buffer_arrives(link):
    one, other = link
    sent = {"a": "x" * 100_000, "n": array("q", range(1_000_000))}
    writer = threading.Thread(target=send, args=(one, sent))
    writer.start()
    assert receive(other) == sent
    writer.join()


@pytest.mark.parametrize("start", [b"", b'{"a"', b'{"a": 1}'])
def test_an_end_in_the_middle_of_a_message(link, start):
    one, other = link
    one.write(start)
    one.close()
    with pytest.raises(EOFError, match="the other end of the socket is closed"):
        receive(other)


def test_rows_follow_each_other_by_request_prompt_and_completion():
    requests = [
        {"adapter": ["n", 3, "/p"], "prompts": 2, "samples": 2, "sampling": {"min_tokens": 5}},
        {"adapter": None, "prompts": 1, "samples": 1, "sampling": {"temperature": 2.0}},
    ]
    arrays = {
        "ids": array("i", [1, 2, 3, 4, 5, 6]),
        "lengths": array("i", [1, 2, 3]),
        "limits": array("i", [4, 9, 7]),
        "seeds": array("q", [10, 11, 12, 13, 14]),
    }

    def row(adapter, prompt, limit, seed, least, **more):
        own = {"max_tokens": limit, "seed": seed, "min_tokens": least, **more}
        return Row(adapter, prompt, own)

    first = ("n", 3, "/p")
    assert rows_of({"requests": requests, **arrays}) == [
        row(first, [1], 4, 10, 4),
        row(first, [1], 4, 11, 4),
        row(first, [2, 3], 9, 12, 5),
        row(first, [2, 3], 9, 13, 5),
        row(None, [4, 5, 6], 7, 14, 0, temperature=2.0),
    ]


@pytest.mark.parametrize(
    ("one", "other", "gap"),
    [
        (([3, 4], [-1.0, -2.0]), ([3, 4], [-1.0, -2.25]), 0.25),
        # Two tokens as likely as each other: rounding chose.
        (([3, 4, 5], [-1.0, -2.0, -9.0]), ([3, 7, 5], [-1.0, -2.0, -1.0]), 0.0),
        (([3, 4], [-1.0, -2.0]), ([5, 4], [-3.0, -2.0]), 2.0),
        (([3], [-1.0]), ([3], [math.nan]), math.nan),
        (([0], [math.nan]), ([0], [math.nan]), 0.0),
        (([3, 0], [-1.0, math.nan]), ([3, 4], [-1.5, -2.0]), 0.5),
        (([], []), ([], []), 0.0),
    ],
)
def test_the_gap_of_two_probes(one, other, gap):
    assert probe_gap(one, other) == pytest.approx(gap, nan_ok=True)
