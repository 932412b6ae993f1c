"""The frame format between a node and its engine process, over a Unix stream socket.

A frame is a 4-byte big-endian length and that many bytes of msgpack: one tagged struct below. The node sends
`Load`, `Encode`, `Stop`; the engine answers each `Load` with `Loaded` or `Fault` and each `Encode` with `Encoded` or
`Fault`, in order. A node may have several `Encode` frames outstanding: the next waits in the socket while the device
works. A runtime in any language can join by speaking this.

An engine that generates is another kind of process: after `Load` it takes `Begin` and `Abort` at any time, and sends a
`Step` after each pass over its running sequences. It answers each `LoadAdapter` and `UnloadAdapter` with `Adapters` or
`Fault`, in the order of these and of `Load`.
"""

import struct
from typing import Literal

import msgspec

from appliance.jobs import Sampling

FRAME_BYTES_MAX = 256 * 1024 * 1024
_LENGTH = struct.Struct(">I")
LENGTH_BYTES = _LENGTH.size


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Make a model resident. `folder` is a verified local folder of safetensors, tokenizer and config."""

    model: str
    folder: str
    dtype: str  # "float32" | "bfloat16" | "float16"
    device: str  # torch's name: "cpu", "cuda:0"
    threads: int  # intra-op threads on a CPU
    cache: str = ""  # a folder of the node's where the engine may keep what it can compute again; "": none
    # "embed": vectors | "score": logits of a text or pair | "tag": logits of each token | "sparse": weights of
    # vocabulary ids | "parse": spans of raw text | "generate": texts
    task: str = "embed"
    sequences_max: int = 0  # of "generate": texts at once; more wait in the engine
    tokens_max: int = 0  # of "generate": of a prompt and its text together; the model's own length bounds it too
    flags: dict[str, str | int | float | bool] = {}  # of a runtime that has its own, by their names there


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """What the adapter declares about the model it holds."""

    model: str
    width: int
    tokens_max: int
    dtype: str
    weights_bytes: int
    load_s: float
    labels: tuple[str, ...] = ()  # of "score" and "tag", in the order of the logits
    activation: str = ""  # what makes scores of logits: "sigmoid" | "softmax" | "identity"; "" for "embed"
    has_token_vectors: bool = False  # of "embed": whether `Encode.per_token` may be asked
    sequences_max: int = 0  # of "generate": how many run at once; more wait in the engine


class Encode(msgspec.Struct, frozen=True, tag="encode"):
    """One batch of tokenized texts, packed end to end: `len(ids) == 4 * sum(lengths)`, int32 little-endian.

    A model that is loaded to "parse" reads `texts`, which are then as many as `lengths` (their estimated sizes), and
    has no `ids`.
    """

    batch: int
    model: str
    ids: bytes
    lengths: tuple[int, ...]
    second_starts: tuple[int, ...] = ()  # per text: where token type 1 begins, 0 for nowhere; (): nowhere in any
    per_token: tuple[int, ...] = ()  # "embed": positions of the texts whose tokens' vectors are wanted, not their own
    texts: tuple[str, ...] = ()


class Encoded(msgspec.Struct, frozen=True, tag="encoded"):
    """The answer to one batch, float32 little-endian, in the order of the texts.

    "embed": one L2-normalized vector per text, or one per token where `Encode.per_token` says so. "score": one row of
    raw logits per text. "tag": one per token, special tokens included. "sparse": rows of (vocabulary id, weight), ids
    ascending. "parse": rows of (start, end, index of the label, score), in characters.
    `len(rows) == 4 * width * sum(counts)`.
    """

    batch: int
    rows: bytes
    width: int  # of a vector, or the number of labels
    bad: tuple[int, ...]  # positions whose vector is not finite or is zero: never to be sent to a client
    device_s: float
    counts: tuple[int, ...] = ()  # rows of each text; (): one each


class Fault(msgspec.Struct, frozen=True, tag="fault"):
    """The frame could not be served. `code` is "oom" (smaller batches may work), "invalid" or "failed"."""

    batch: int  # of an `Encode`; -1 when it answers another frame
    code: str
    message: str


class Begin(msgspec.Struct, frozen=True, tag="begin", omit_defaults=True):
    """Write a text after these tokens, or (with `weighed`) only say how probable some tokens are as the next one.

    The node numbers sequences from 1 and never uses a number twice in one engine's life.
    """

    sequence: int
    model: str
    ids: bytes  # int32 little-endian
    tokens_max: int  # of the text, 1 at least; with those of `ids` within `Loaded.tokens_max`
    sampling: Sampling = Sampling()
    stop_ids: tuple[int, ...] = ()  # tokens that end the text, besides the model's own
    grammar: str = ""  # of llguidance (JSON); "": anything
    top_logprobs: int | None = None
    weighed: tuple[int, ...] = ()
    adapter: str = ""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Nobody wants these sequences any more. Unknown ones are ignored; nothing more is said of them."""

    sequences: tuple[int, ...]


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter"):
    """Make a LoRA adapter of the model ready to be named by `Begin.adapter`. `folder` is one of safetensors."""

    adapter: str
    folder: str


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload_adapter"):
    """No further sequence names it; those that run with it go on. Answered when none does, or after a limit of time."""

    adapter: str


class Adapters(msgspec.Struct, frozen=True, tag="adapters"):
    """The names that `Begin.adapter` may have now."""

    names: tuple[str, ...]


class Grown(msgspec.Struct, frozen=True, array_like=True):
    """What a step added to a sequence. One that has a `finish` is over, and its place is free."""

    sequence: int
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()  # one of each of `ids`, before temperature, where asked for; of `weighed`: theirs
    top_ids: tuple[tuple[int, ...], ...] = ()
    top_logprobs: tuple[tuple[float, ...], ...] = ()
    # "stop": by a token that ends texts, then the last of `ids`, or because the grammar allows no more | "length" |
    # "fault": see `fault` | "refused": likewise, and the request is to blame: its grammar cannot be followed further
    finish: Literal["", "stop", "length", "fault", "refused"] = ""
    fault: str = ""  # why it cannot go on: words for the client, without the engine's insides
    cached: int = 0  # with the first step: tokens of the prompt that were not computed again


class Step(msgspec.Struct, frozen=True, tag="step"):
    """What one pass over all running sequences gave. Sent by engines that generate, whenever there is something."""

    grown: tuple[Grown, ...]
    device_s: float  # of the pass
    running: int = 0  # sequences in the pass
    waiting: int = 0  # sequences begun that have no place yet


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Finish the frame at hand and exit with 0."""


ToEngine = Load | Encode | Begin | Abort | LoadAdapter | UnloadAdapter | Stop
FromEngine = Loaded | Encoded | Step | Adapters | Fault

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def frame(message: ToEngine | FromEngine) -> bytes:
    """`message` with its length in front. Raises ValueError over `FRAME_BYTES_MAX`."""
    body = _encoder.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise ValueError(f"a frame of {len(body)} B is over the limit of {FRAME_BYTES_MAX} B; send smaller batches")
    return _LENGTH.pack(len(body)) + body


def body_length(header: bytes) -> int:
    """Bytes of body that follow this header. Raises ValueError over the limit: the peer speaks something else."""
    (length,) = _LENGTH.unpack(header)
    if length > FRAME_BYTES_MAX:
        raise ValueError(f"a frame announces {length} B, the limit is {FRAME_BYTES_MAX} B")
    return int(length)


def decode_to_engine(body: bytes) -> ToEngine:
    """Raises `msgspec.DecodeError` (or its `ValidationError`) for a body that is no frame for an engine."""
    return _to_engine.decode(body)


def decode_from_engine(body: bytes) -> FromEngine:
    """Raises `msgspec.DecodeError` (or its `ValidationError`) for a body that is no frame from an engine."""
    return _from_engine.decode(body)
