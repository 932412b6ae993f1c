"""Decoding a client's body: strict first, and every fault told in the client's own field names.

A body is decoded with a decoder that refuses unknown fields, since most bodies have none and that costs one pass. Only
when it refuses one does a second, lenient pass run, and the unknown names are reported for `x-appliance-ignored`.
"""

import re
from typing import Generic, TypeVar, cast

import msgspec

from appliance.compat.field_words import words_at
from appliance.compat.formats import Format
from appliance.errors import InvalidRequest, MalformedBody

S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T")

IGNORED_NAMES_MAX = 20
_LOCATED = re.compile(r"^(?P<what>.*) - at `\$\.?(?P<path>[^`]*)`$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(?P<field>[^`]+)`")
# How msgspec words what is wrong, but for missing fields.
_TYPE = re.compile(r"Expected `(?P<wanted>[^`]+)`, got `(?P<got>[^`]+)`")
_LENGTH = re.compile(r"Expected `(?P<kind>\w+)` of length (?P<relation>[<>]=?) (?P<bound>\d+)")
_BOUND = re.compile(r"Expected `\w+` (?P<relation>[<>]=?) (?P<bound>\S+)")
_VALUE = re.compile(r"Invalid (enum )?value (?P<value>.*)", re.DOTALL)
_KINDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "an array",
    "object": "an object",
}
_PARTS = {"str": "characters", "object": "fields"}
_RELATIONS = {"<=": "at most", ">=": "at least", "<": "less than", ">": "more than"}
_VALUE_CHARS_MAX = 100
_FAULTS = {"Input data was truncated": "it ends too early", "Invalid UTF-8 encoded string": "it is no UTF-8"}
_FAULT = re.compile(r"^(JSON|MessagePack data) is malformed: ")
# One decoder a form.
_Decoders = dict[Format, msgspec.json.Decoder[S] | msgspec.msgpack.Decoder[S]]


def _decoders(kind: type[S]) -> _Decoders[S]:
    return {"json": msgspec.json.Decoder(kind), "msgpack": msgspec.msgpack.Decoder(kind)}


_RawFields = dict[str, msgspec.Raw]
_keys: dict[Format, msgspec.json.Decoder[_RawFields] | msgspec.msgpack.Decoder[_RawFields]] = {
    "json": msgspec.json.Decoder(_RawFields),
    "msgpack": msgspec.msgpack.Decoder(_RawFields),
}


class BodyDecoder(Generic[S]):
    """Decodes one endpoint's body; `strict` is its struct, with `forbid_unknown_fields=True`."""

    def __init__(self, strict: type[S]) -> None:
        assert strict.__struct_config__.forbid_unknown_fields, "the strict struct must forbid unknown fields"
        lenient = msgspec.defstruct(strict.__name__, [], bases=(strict,), frozen=True, forbid_unknown_fields=False)
        self._strict: _Decoders[S] = _decoders(strict)
        self._lenient: _Decoders[S] = _decoders(cast("type[S]", lenient))
        self._kind = strict
        self._known = {field.encode_name for field in msgspec.structs.fields(strict)}

    def decode(self, body: bytes, form: Format = "json") -> tuple[S, tuple[str, ...]]:
        """The body and the names of the fields that were ignored.

        Raises MalformedBody (not of this form, not an object) or InvalidRequest (a field of the wrong type; `param`
        names it).
        """
        try:
            return self._strict[form].decode(body), ()
        except msgspec.ValidationError as error:
            if "unknown field" not in str(error):
                raise _explained(error, self._kind) from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _malformed(body, error, form) from error
        return self._decode_with_unknown(body, form)

    def _decode_with_unknown(self, body: bytes, form: Format) -> tuple[S, tuple[str, ...]]:
        try:
            call = self._lenient[form].decode(body)
        except msgspec.ValidationError as error:
            raise _explained(error, self._kind) from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _malformed(body, error, form) from error
        unknown = [name for name in _keys[form].decode(body) if name not in self._known]
        return call, tuple(unknown[:IGNORED_NAMES_MAX])


def decoded_part(raw: msgspec.Raw, decoder: msgspec.json.Decoder[T], name: str) -> T:
    """The array of a JSON body's field that is decoded apart, since it also travels on as it is; raises like a body."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise _explained(error, decoder.type, root=name) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _malformed(bytes(raw), error, "json") from error


def _explained(error: msgspec.ValidationError, kind: object, *, root: str = "") -> InvalidRequest:
    """msgspec's words in ours, with the field in front: "Expected `str`, got `int` - at `$.model`" names `model`.

    `kind` is what was to be decoded: a whole body, or the array of its field `root`.
    """
    text = str(error)
    located = _LOCATED.match(text)
    what, inner = (located["what"], located["path"]) if located else (text, "")
    path = (root + inner).replace("[...]", "")  # a map's key, which is not told
    if missing := _MISSING.search(what):
        field = f"{path}.{missing['field']}" if path else missing["field"]
        return InvalidRequest(f"missing required field '{field}'", param=field)
    if found := _VALUE.fullmatch(what):
        words = ", ".join(words_at(kind, inner))
        return InvalidRequest(f"'{path}' is {found['value'][:_VALUE_CHARS_MAX]}; it must be one of {words}", param=path)
    if not path:
        return MalformedBody(f"the request body {_in_words(what)}")
    return InvalidRequest(f"'{path}' {_in_words(what)}", param=path)


def _in_words(what: str) -> str:
    """What is wrong with a field, as what is to be said of it: "must be a string, not null"."""
    if found := _TYPE.fullmatch(what):
        *kinds, last = (_KINDS.get(kind, kind) for kind in found["wanted"].split(" | "))
        wanted = f"{', '.join(kinds)} or {last}" if kinds else last
        return f"must be {wanted}, not {_KINDS.get(found['got'], found['got'])}"
    if found := _LENGTH.fullmatch(what):
        parts = _PARTS.get(found["kind"], "items")
        count = f"1 {parts.removesuffix('s')}" if found["bound"] == "1" else f"{found['bound']} {parts}"
        return f"must have {_RELATIONS[found['relation']]} {count}"
    if found := _BOUND.fullmatch(what):
        return f"must be {_RELATIONS[found['relation']]} {found['bound'].removesuffix('.0')}"
    return f"is wrong: {what[:1].lower()}{what[1:]}".replace("`", "'")


def _malformed(body: bytes, error: Exception, form: Format) -> MalformedBody:
    if not body.strip():
        return MalformedBody("the request body is empty; send a JSON object")
    return MalformedBody(f"the request body is not valid {'JSON' if form == 'json' else 'msgpack'}: {why(error)}")


def why(error: Exception) -> str:
    """What makes bytes no JSON or msgpack, in words to end a sentence with."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    text = str(error)
    return _FAULTS.get(text) or _FAULT.sub("", text)
