"""The frame format between a node and its engine process."""

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.workers import wire
from appliance.workers.wire import Encode, Encoded, Fault, Load, Loaded, Stop

TO_ENGINE = [
    Load("BAAI/bge-m3", "/models/é", "bfloat16", "cuda:0", 2),
    Encode(7, "m", b"\x01\x00\x00\x00\xff\xff\xff\x7f", (1, 1)),
    Encode(2**40, "m", b"", ()),
    Stop(),
]
FROM_ENGINE = [
    Loaded("m", 384, 512, "float32", 2**33, 0.25),
    Encoded(7, b"\x00\x00\x80\x3f", 1, (0,), 0.001),
    Fault(-1, "oom", "the device is out of memory"),
]


@pytest.mark.parametrize("message", TO_ENGINE, ids=lambda message: type(message).__name__)
def test_an_order_survives_the_wire(message: wire.ToEngine) -> None:
    frame = wire.frame(message)

    assert wire.body_length(frame[: wire.LENGTH_BYTES]) == len(frame) - wire.LENGTH_BYTES
    assert wire.decode_to_engine(frame[wire.LENGTH_BYTES :]) == message


@pytest.mark.parametrize("message", FROM_ENGINE, ids=lambda message: type(message).__name__)
def test_an_answer_survives_the_wire(message: wire.FromEngine) -> None:
    assert wire.decode_from_engine(wire.frame(message)[wire.LENGTH_BYTES :]) == message


def test_the_length_is_big_endian() -> None:
    frame = wire.frame(Stop())

    assert frame[:4] == (len(frame) - 4).to_bytes(4, "big")


def test_the_body_is_a_tagged_map_that_any_language_can_read() -> None:
    body = wire.frame(Encode(3, "m", b"\x05\x00\x00\x00", (1,)))[wire.LENGTH_BYTES :]

    assert msgspec.msgpack.decode(body) == {
        "type": "encode",
        "batch": 3,
        "model": "m",
        "ids": b"\x05\x00\x00\x00",
        "lengths": [1],
        "second_starts": [],
        "per_token": [],
        "texts": [],
    }


def test_a_frame_over_the_limit_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    order = Encode(1, "m", bytes(1000), (250,))
    size = len(wire.frame(order)) - wire.LENGTH_BYTES

    monkeypatch.setattr(wire, "FRAME_BYTES_MAX", size)
    assert len(wire.frame(order)) == size + wire.LENGTH_BYTES

    monkeypatch.setattr(wire, "FRAME_BYTES_MAX", size - 1)
    with pytest.raises(ValueError, match="send smaller batches"):
        wire.frame(order)


def test_an_announced_length_over_the_limit_is_refused_before_it_is_read() -> None:
    assert wire.body_length(wire.FRAME_BYTES_MAX.to_bytes(4, "big")) == wire.FRAME_BYTES_MAX
    with pytest.raises(ValueError, match="the limit is"):
        wire.body_length((wire.FRAME_BYTES_MAX + 1).to_bytes(4, "big"))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"type": "explode"}),
        msgspec.msgpack.encode({"type": "encode", "batch": 1}),
        msgspec.msgpack.encode({"type": "encode", "batch": "1", "model": "m", "ids": b"", "lengths": []}),
        wire.frame(Loaded("m", 1, 1, "float32", 1, 0.0))[wire.LENGTH_BYTES :],
    ],
    ids=["empty", "reserved byte", "unknown tag", "fields missing", "wrong type", "an answer"],
)
def test_what_is_no_order_is_refused(body: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        wire.decode_to_engine(body)


@given(st.binary(max_size=200))
def test_garbage_raises_decode_errors_only(body: bytes) -> None:
    for decode in (wire.decode_to_engine, wire.decode_from_engine):
        with contextlib.suppress(msgspec.DecodeError):
            decode(body)
