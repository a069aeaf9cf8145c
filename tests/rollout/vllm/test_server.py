"""The messages between the two processes, and what is read from them."""

import json
import math
import socket
import struct
import threading
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evo_grpo.rollout.vllm.server import Message, Row, probe_gap, receive, rows_of, send

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
def pair_of_sockets():
    one, other = socket.socketpair()
    with one, other:
        yield one, other


@given(
    values=st.dictionaries(st.text(max_size=5), PLAIN, max_size=4),
    arrays=st.dictionaries(st.text(max_size=5), ARRAYS, max_size=4),
)
def test_a_message_arrives_as_it_was_sent(values, arrays):
    one, other = socket.socketpair()
    with one, other:
        send(one, Message(values, arrays))
        send(one, Message({"second": True}, {}))
        got = receive(other)
        assert got.values == values
        assert list(got.arrays) == list(arrays)
        for name, sent in arrays.items():
            assert got.arrays[name].typecode == sent.typecode
            assert got.arrays[name].tobytes() == sent.tobytes()  # NaN too
        assert receive(other) == Message({"second": True}, {})


def test_a_message_larger_than_any_buffer_arrives(pair_of_sockets):
    one, other = pair_of_sockets
    sent = Message({"a": "x" * 100_000}, {"n": array("q", range(1_000_000))})
    writer = threading.Thread(target=send, args=(one, sent))
    writer.start()
    assert receive(other) == sent
    writer.join()


@pytest.mark.parametrize("bytes_left", [0, 3, 8, 20])
def test_an_end_in_the_middle_of_a_message(pair_of_sockets, bytes_left):
    one, other = pair_of_sockets
    header = json.dumps({"values": {}, "arrays": [["n", "q", 5]]}).encode()
    whole = struct.pack("<Q", len(header)) + header + bytes(40)
    one.sendall(whole[:bytes_left])
    one.close()
    with pytest.raises(EOFError, match="the other end of the socket is closed"):
        receive(other)


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ({"values": {}, "arrays": [["n", "d", 1]]}, r"an array of one of \['b', 'f', 'i', 'q'\]"),
        ({"values": {}, "arrays": [["n", "u", 1]]}, "got 'u'"),
        (None, "expected a header of at most 268435456 bytes, got 1152921504606846976"),
    ],
)
def test_what_is_no_message(pair_of_sockets, header, why):
    one, other = pair_of_sockets
    told = json.dumps(header).encode()
    one.sendall(struct.pack("<Q", len(told) if header else 1 << 60) + told)
    with pytest.raises(ValueError, match=why):
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
    assert rows_of(Message({"requests": requests}, arrays)) == [
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
