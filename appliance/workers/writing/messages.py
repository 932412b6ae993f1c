"""OpenAI's chat messages as chat templates take them. Pure.

The gateway has checked their shape. Here parts become text, "developer" is what it was before it had a name of its own,
and function calls have their arguments as objects, since templates write them out themselves.
"""

import json
from collections.abc import Sequence
from typing import Any, Final

from appliance.errors import InvalidRequest

Message = dict[str, Any]  # `Any`: JSON

_ROLES: Final = {"developer": "system", "function": "tool"}

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


def normalized(messages: Sequence[Message]) -> list[Message]:
    """Raises InvalidRequest for arguments of a call that are no JSON object."""
    return [_normalized(message, index) for index, message in enumerate(messages)]


def spelled_out(messages: Sequence[Message], tools: Sequence[Any]) -> list[Message]:
    """Normalized messages without anything that only templates with functions know."""
    plain = [_plain(message) for message in messages]
    if not tools:
        return plain
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    preamble = _PREAMBLE.format(tools=listed)
    if plain and plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{preamble}"}, *plain[1:]]
    return [{"role": "system", "content": preamble}, *plain]


def _normalized(message: Message, index: int) -> Message:
    found = {key: value for key, value in message.items() if value is not None and key != "tool_calls"}
    found["role"] = _ROLES.get(message["role"], message["role"])
    found["content"] = _text(message.get("content"))
    calls = message.get("tool_calls") or []
    if legacy := message.get("function_call"):
        calls = [{"type": "function", "id": "", "function": legacy}]
    if calls:
        found["tool_calls"] = [
            _call(call, f"messages[{index}].tool_calls[{place}]") for place, call in enumerate(calls)
        ]
    found.pop("function_call", None)
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
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as exc:
            raise InvalidRequest(
                f"'{param}.function.arguments' is no JSON: {exc}", param=f"{param}.function.arguments"
            ) from exc
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"'{param}.function.arguments' is no JSON object", param=f"{param}.function.arguments")
    return {**call, "function": {**function, "arguments": arguments}}


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
