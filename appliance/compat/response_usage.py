"""The usage of OpenAI's newer endpoints (`/v1/responses`, `/v1/decisions`): input and output tokens, with details."""

import msgspec

from appliance.jobs import Usage


class InputTokensDetails(msgspec.Struct, frozen=True):
    """Of the input's tokens."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """Of the output's tokens."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    """The tokens that were computed."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> "ResponseUsage":
        """In OpenAI's words."""
        return cls(
            input_tokens=usage.input_tokens,
            input_tokens_details=InputTokensDetails(usage.cached_tokens),
            output_tokens=usage.output_tokens,
            output_tokens_details=OutputTokensDetails(usage.reasoning_tokens),
            total_tokens=usage.input_tokens + usage.output_tokens,
        )
