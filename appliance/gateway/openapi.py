"""The OpenAPI 3.1 document of a table of operations. Pure.

Litestar's own generator sees nothing of `@asgi` handlers, so it is made here, of what serves the requests itself: the
structs that bodies are decoded into and answers are encoded from.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from appliance import __version__
from appliance.compat.formats import CONTENT_TYPES
from appliance.gateway.http import Dialect
from appliance.gateway.operation import Operation

Json = dict[str, Any]  # `Any`: a JSON document, of no interest to a type checker

DESCRIPTION = """\
An OpenAI- and Cohere-compatible inference appliance. Bodies and answers of endpoints that take a body are JSON or \
msgpack, by `Content-Type` and `Accept`. Unknown fields of a body are ignored, and named in `x-appliance-ignored`. \
Explicit nulls mean absent. docs/compat.md says which field of which vendor is served, ignored or refused."""

HEADERS: dict[str, str] = {
    "x-request-id": "The request's id: the client's own where it sent a harmless one",
    "x-appliance-ignored": "Names of fields that were sent and had no effect, comma-separated",
    "x-appliance-truncated": "Indices of inputs that were cut to the model's length, comma-separated",
    "x-appliance-space": "What vectors must share to be compared: model, weights, pooling, prompts, width, padding",
    "x-appliance-fingerprint": "The same in 16 digits; `x-appliance-expect-fingerprint` of a request refuses another",
    "cache-control": "Of a stream: no-cache",
    "x-accel-buffering": "Of a stream: no, so that proxies pass its parts on as they come",
    "retry-after": "Seconds to wait before the next attempt, between 1 and 60",
    "retry-after-ms": "The same in milliseconds",
    "allow": "The methods that the path takes",
    "www-authenticate": "How to authenticate",
}
FAULTS: dict[int, str] = {
    400: "The request is malformed, or says something that cannot be served; `param` names the field",
    401: "No API key, or a wrong one",
    404: "No such model",
    405: "The path takes another method",
    408: "The request did not arrive in time",
    413: "The body, or one input, is too large",
    500: "An error of the server",
    429: "The key has sent more requests than it may; try again when `retry-after` says",
    503: "Too busy, or the model is not ready; try again when `retry-after` says",
    504: "The deadline passed before the work was done",
}
FAULT_HEADERS: dict[int, tuple[str, ...]] = {
    401: ("www-authenticate",),
    405: ("allow",),
    429: ("retry-after", "retry-after-ms"),
    503: ("retry-after", "retry-after-ms"),
}
_STREAM_HEADERS = ("cache-control", "x-accel-buffering")
_OF_ALL = (405, 500)
_OF_BODIES = (400, 404, 408, 413, 429, 503, 504)


class OpenAIFault(msgspec.Struct, frozen=True):
    """What went wrong. `code` is fit for programs, `param` names the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIErrorBody(msgspec.Struct, frozen=True):
    """OpenAI's error body; `message` is repeated where Cohere's clients look for it."""

    error: OpenAIFault
    message: str


class CohereErrorBody(msgspec.Struct, frozen=True):
    """Cohere's error body."""

    message: str


_ERRORS: dict[Dialect, type[msgspec.Struct]] = {"openai": OpenAIErrorBody, "cohere": CohereErrorBody}


def document(operations: Sequence[Operation]) -> Json:
    """The whole document. Aliases of a path are named in its description."""
    kinds = _kinds(operations)
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    refs = dict(zip(kinds, schemas, strict=True))
    paths: Json = {}
    for operation in operations:
        item = paths.setdefault(_template(operation.paths[0]), {})
        item |= {method.lower(): _operation(operation, method, refs) for method in operation.methods}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Appliance",
            "version": __version__,
            "description": DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{"key": []}],
        "paths": paths,
        "components": {
            "schemas": {name: _open(schema) for name, schema in components.items()},
            "headers": {name: _header(name) for name in HEADERS},
            "responses": {
                _fault_name(status, dialect): _fault(status, dialect, refs) for status in FAULTS for dialect in _ERRORS
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _kinds(operations: Iterable[Operation]) -> list[type[msgspec.Struct]]:
    named = [kind for operation in operations for kind in (operation.body, operation.answer) if kind is not None]
    return list(dict.fromkeys([*named, *_ERRORS.values()]))


def _operation(operation: Operation, method: str, refs: dict[type[msgspec.Struct], Json]) -> Json:
    path, *aliases = map(_template, operation.paths)
    described: Json = {"summary": operation.summary, "operationId": _operation_id(method, path)}
    if aliases:
        described["description"] = f"Also served at {', '.join(aliases)}."
    parameters = [*_path_parameters(path), *_query_parameters(operation.query)]
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": _forms(refs[operation.body])}
    described["responses"] = _responses(operation, method, refs)
    if operation.is_open:
        described["security"] = []
    return described


def _responses(operation: Operation, method: str, refs: dict[type[msgspec.Struct], Json]) -> Json:
    names = ("x-request-id", *operation.headers, *(_STREAM_HEADERS if operation.stream_type else ()))
    answered: Json = {"description": "The answer", "headers": {name: _ref("headers", name) for name in names}}
    if method != "HEAD":
        answered["content"] = _content(operation, refs)
    statuses = dict.fromkeys((200, *operation.statuses), answered)
    faults = [*_OF_ALL]
    if not operation.is_open:
        faults.append(401)
    if operation.body is not None:
        faults += _OF_BODIES
    if operation.query:
        faults.append(400)
    if operation.serve_named is not None:
        faults.append(404)
    refused = {status: _ref("responses", _fault_name(status, operation.dialect)) for status in faults}
    return {str(status): described for status, described in sorted({**refused, **statuses}.items())}


def _content(operation: Operation, refs: dict[type[msgspec.Struct], Json]) -> Json:
    if operation.answer is None:
        return {operation.content_type.decode(): {}}
    streamed: Json = {operation.stream_type.decode(): {}} if operation.stream_type else {}
    return _forms(refs[operation.answer]) | streamed


def _forms(schema: Json) -> Json:
    return {content_type.decode(): {"schema": schema} for content_type in CONTENT_TYPES.values()}


def _fault(status: int, dialect: Dialect, refs: dict[type[msgspec.Struct], Json]) -> Json:
    names = ("x-request-id", *FAULT_HEADERS.get(status, ()))
    return {
        "description": FAULTS[status],
        "headers": {name: _ref("headers", name) for name in names},
        "content": _forms(refs[_ERRORS[dialect]]),
    }


def _fault_name(status: int, dialect: Dialect) -> str:
    return f"{dialect}_{status}"


def _header(name: str) -> Json:
    return {"description": HEADERS[name], "schema": {"type": "string"}}


def _ref(kind: str, name: str) -> Json:
    return {"$ref": f"#/components/{kind}/{name}"}


def _open(schema: Json) -> Json:
    """What a struct that forbids unknown fields says, without that: they are ignored, and named in a header."""
    return {key: value for key, value in schema.items() if key != "additionalProperties" or value is not False}


def _template(path: str) -> str:
    """Litestar's "{name:str}" as "{name}"."""
    return re.sub(r"\{(\w+):\w+\}", r"{\1}", path)


def _path_parameters(path: str) -> list[Json]:
    names = re.findall(r"\{(\w+)\}", path)
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]


def _query_parameters(names: Iterable[str]) -> list[Json]:
    return [{"name": name, "in": "query", "schema": {"type": "string"}} for name in names]


def _operation_id(method: str, path: str) -> str:
    return "_".join([method.lower(), *re.findall(r"\w+", path)])
