"""SGLang's stream of events as what has grown of a sequence. Pure."""

import re
from typing import Final, Literal

import msgspec

from appliance.workers.wire import Begin, Grown

EVENT_BYTES_MAX: Final = 16 * 1024 * 1024
LOGPROB_MIN: Final = -9999.0  # OpenAI's word for "next to impossible"; JSON has none for minus infinity
_DONE: Final = b"[DONE]"
# What `inside/plugin/appliance_sglang.py` says of a grammar, in a message and under a status of SGLang's own.
UNFIT: Final = "the answer cannot follow the requested form"
_MESSAGE_CHARS_MAX: Final = 200
_PATH: Final = re.compile(r"(?<![\w:/])/[^\s'\",;:()]+")

# Of one token: its log-probability (None: no number), its id, and its text, which we do not ask for.
Place = tuple[float | None, int, str | None]


class FinishReason(msgspec.Struct, frozen=True):
    """Why a text ended."""

    type: str  # "stop", "length", "abort"
    message: str = ""
    status_code: int | None = None


class Meta(msgspec.Struct, frozen=True):
    """What an event says beside the ids, as far as it is read."""

    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    output_token_logprobs: tuple[Place, ...] = ()
    output_top_logprobs: tuple[tuple[Place, ...] | None, ...] = ()
    output_token_ids_logprobs: tuple[tuple[Place, ...] | None, ...] = ()


class Refusal(msgspec.Struct, frozen=True):
    """An error in place of an event."""

    message: str = ""
    code: int | None = None


class Event(msgspec.Struct, frozen=True):
    """One event. With `--incremental-streaming-output` it has only what is new."""

    output_ids: tuple[int, ...] = ()
    meta_info: Meta = Meta()
    error: Refusal | None = None


class StreamBroken(Exception):
    """The stream ended early, or is not what SGLang sends."""


_event_decoder = msgspec.json.Decoder(Event)


class EventLines:
    """Cuts a stream of server-sent events into their data. Fed with bytes as they come."""

    def __init__(self) -> None:
        self.is_done = False
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of the events that are complete now. Raises StreamBroken for one that is too long."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > EVENT_BYTES_MAX:
            raise StreamBroken(f"an event is over {EVENT_BYTES_MAX} B")
        found = [line[5:].strip() for line in lines if line.startswith(b"data:")]
        if _DONE in found:
            self.is_done = True
            found = found[: found.index(_DONE)]
        return found


def decode_event(data: bytes) -> Event:
    """Raises StreamBroken."""
    try:
        return _event_decoder.decode(data)
    except msgspec.DecodeError as exc:
        raise StreamBroken(f"an event cannot be read: {exc}") from exc


def grown_of(event: Event, begin: Begin, *, is_first: bool) -> Grown:
    """What this event added. Raises StreamBroken where its numbers do not belong together."""
    meta = event.meta_info
    if event.error is not None:
        return fault(begin.sequence, event.error.message, status=event.error.code)
    reason = meta.finish_reason
    if reason is not None and reason.type not in {"stop", "length"}:
        return fault(begin.sequence, reason.message, status=reason.status_code)
    cached = meta.cached_tokens if is_first else 0
    if begin.weighed:
        return _weighed(meta, begin, cached=cached)
    finish: Literal["", "stop", "length"] = ""
    if reason is not None:
        finish = "stop" if reason.type == "stop" else "length"
    ids = event.output_ids
    if begin.top_logprobs is None:
        return Grown(begin.sequence, ids, finish=finish, cached=cached)
    tops = meta.output_top_logprobs if begin.top_logprobs else ((),) * len(ids)
    chosen = meta.output_token_logprobs
    if tuple(token for _, token, _ in chosen) != ids or len(tops) != len(ids):
        raise StreamBroken(f"{len(ids)} tokens came with {len(chosen)} log-probabilities and {len(tops)} rankings")
    return Grown(
        begin.sequence,
        ids,
        tuple(_number(logprob) for logprob, _, _ in chosen),
        tuple(tuple(token for _, token, _ in top or ()) for top in tops),
        tuple(tuple(_number(logprob) for logprob, _, _ in top or ()) for top in tops),
        finish=finish,
        cached=cached,
    )


def fault(sequence: int, message: str, *, status: int | None) -> Grown:
    """Why a sequence cannot go on. What the request is to blame for is said in SGLang's words, the rest is not."""
    if UNFIT in message:
        return Grown(sequence, finish="refused", fault=public(message[message.index(UNFIT) :]))
    if message and status is not None and 400 <= status < 500:
        return Grown(sequence, finish="refused", fault=public(message))
    return Grown(sequence, finish="fault", fault="the engine failed")


def public(message: str) -> str:
    """One bounded line without file paths: it may travel to a client."""
    line = _PATH.sub("<path>", " ".join(message.split()))
    return line if len(line) <= _MESSAGE_CHARS_MAX else line[: _MESSAGE_CHARS_MAX - 1] + "…"


def _weighed(meta: Meta, begin: Begin, *, cached: int) -> Grown:
    rows = meta.output_token_ids_logprobs
    known = {token: _number(logprob) for logprob, token, _ in (rows[0] or () if rows else ())}
    if not known.keys() >= set(begin.weighed):
        raise StreamBroken(f"{len(begin.weighed)} tokens were to be weighed and {len(known)} were")
    return Grown(begin.sequence, logprobs=tuple(known[token] for token in begin.weighed), finish="stop", cached=cached)


def _number(logprob: float | None) -> float:
    return LOGPROB_MIN if logprob is None else max(logprob, LOGPROB_MIN)
