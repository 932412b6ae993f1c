"""OpenAI's chat messages as chat templates take them. Pure.

The gateway has checked their shape. Here parts become text, "developer" is what it was before it had a name of its own,
and function calls have their arguments as objects, since templates write them out themselves. What no template reads is
left out.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Final

import msgspec

from appliance.errors import InvalidRequest

Message = dict[str, Any]  # `Any`: JSON

LEVELS_MAX: Final = 64  # of a call's arguments: what templates can write out again, whatever their depth of calls
_ROLES: Final = {"developer": "system", "function": "tool"}
_KEPT: Final = ("name", "tool_call_id", "reasoning_content")
_SHORT_ID_CHARS: Final = 9  # of Mistral's calls, whose templates refuse any other

# For templates that know no functions: the convention of Hermes, Qwen and others.
CALL_OPENS: Final = "<tool_call>"
CALL_CLOSES: Final = "</tool_call>"
_PREAMBLE: Final = """You may call functions to answer. These are their signatures, in JSON:
<tools>
{tools}
</tools>
To call a function, write its name and its arguments as JSON like this:
<tool_call>
{{"name": <function's name>, "arguments": <object of arguments>}}
</tool_call>"""


def normalized(messages: Sequence[Message], *, has_short_ids: bool = False) -> list[Message]:
    """`has_short_ids`: ids of calls become others of nine letters. A result gets the name of the function it is of.

    Raises InvalidRequest for arguments of a call that are no JSON object.
    """
    names: dict[str, str] = {}
    found = [_normalized(message, index) for index, message in enumerate(messages)]
    for message in found:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
            call["id"] = _short(call["id"]) if has_short_ids else call["id"]
        call_id = message.get("tool_call_id")
        if call_id in names:
            message.setdefault("name", names[call_id])
        if call_id is not None and has_short_ids:
            message["tool_call_id"] = _short(call_id)
    return found


def spelled_out(messages: Sequence[Message], tools: Sequence[Any], *, has_system: bool = True) -> list[Message]:
    """Normalized messages without anything that only templates with functions know.

    Without `has_system` the functions are told by the user. Results of several calls are one message, since many
    templates want roles to alternate.
    """
    plain: list[Message] = []
    for is_result, group in groupby(messages, key=lambda message: message["role"] == "tool"):
        made = [_plain(message) for message in group]
        plain += [{**made[0], "content": "\n".join(each["content"] for each in made)}] if is_result else made
    if not tools:
        return plain
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    preamble = _PREAMBLE.format(tools=listed)
    if plain and plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{preamble}"}, *plain[1:]]
    if not has_system and plain and plain[0]["role"] == "user":
        return [{**plain[0], "content": f"{preamble}\n\n{plain[0]['content']}"}, *plain[1:]]
    return [{"role": "system" if has_system else "user", "content": preamble}, *plain]


def by_turns(messages: Sequence[Message], *, has_system: bool) -> list[Message]:
    """Normalized messages as the narrowest templates take them: a user and an assistant by turns, a system before.

    Neighbours of one role become one message. What the system says later is said by the user; and all that it says,
    without `has_system`.
    """
    found: list[Message] = []
    for role, group in groupby(_placed(messages, has_system=has_system), key=lambda message: message["role"]):
        if role == "tool":  # each is of a call of its own
            found += group
        else:
            made = list(group)
            calls = [call for each in made for call in each.get("tool_calls", ())]
            whole = {**made[0], "content": "\n\n".join(each["content"] for each in made if each["content"])}
            found.append({**whole, "tool_calls": calls} if calls else whole)
    return found


def _placed(messages: Sequence[Message], *, has_system: bool) -> Iterator[Message]:
    is_first = has_system
    for message in messages:
        is_first = is_first and message["role"] == "system"
        yield {**message, "role": "user"} if message["role"] == "system" and not is_first else message


def _normalized(message: Message, index: int) -> Message:
    found = {key: message[key] for key in _KEPT if isinstance(message.get(key), str)}
    found["role"] = _ROLES.get(message["role"], message["role"])
    found["content"] = _text(message.get("content")) or _text(message.get("refusal"))
    legacy = message.get("function_call")
    calls = message.get("tool_calls") or ([{"id": "", "function": legacy}] if legacy else [])
    if calls:
        found["tool_calls"] = [
            _call(call, f"messages[{index}].tool_calls[{place}]") for place, call in enumerate(calls)
        ]
    return found


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    parts = [part.get("text") or part.get("refusal") or "" for part in content if isinstance(part, dict)]
    return "\n".join(parts)


def _call(call: dict[str, Any], param: str) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            # Not Python's own, which lets halves of characters through that no tokenizer takes.
            arguments = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, RecursionError) as exc:
            raise InvalidRequest(
                f"'{param}.function.arguments' is no JSON: {exc}", param=f"{param}.function.arguments"
            ) from exc
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"'{param}.function.arguments' is no JSON object", param=f"{param}.function.arguments")
    if _is_deep(arguments):
        raise InvalidRequest(
            f"'{param}.function.arguments' is nested deeper than {LEVELS_MAX} levels",
            param=f"{param}.function.arguments",
        )
    return {
        "id": call.get("id") or "",
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _is_deep(arguments: dict[str, Any]) -> bool:
    row: list[Any] = [arguments]
    for _ in range(LEVELS_MAX):
        containers = [value for value in row if isinstance(value, dict | list)]
        row = [inner for value in containers for inner in (value.values() if isinstance(value, dict) else value)]
    return any(isinstance(value, dict | list) for value in row)


def _short(call_id: str) -> str:
    return hashlib.sha256(call_id.encode()).hexdigest()[:_SHORT_ID_CHARS]


def _plain(message: Message) -> Message:
    content = message["content"]
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [
        f"{CALL_OPENS}\n{json.dumps(_named(call), ensure_ascii=False)}\n{CALL_CLOSES}"
        for call in message.get("tool_calls", ())
    ]
    return {"role": message["role"], "content": "\n".join([*([content] if content else []), *calls])}


def _named(call: dict[str, Any]) -> dict[str, Any]:
    return {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
