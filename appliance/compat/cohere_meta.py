"""`meta` of Cohere's answers. cohere-python adds up the billed units of its batches, so they are always there."""

from typing import Literal

import msgspec

Version = Literal["1", "2"]


class ApiVersion(msgspec.Struct, frozen=True):
    """Which of Cohere's APIs the path belongs to."""

    version: Version


class BilledUnits(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the request took; each endpoint fills in its own unit."""

    input_tokens: int | None = None
    search_units: int | None = None
    classifications: int | None = None


class Meta(msgspec.Struct, frozen=True, omit_defaults=True):
    """About an answer."""

    api_version: ApiVersion
    billed_units: BilledUnits | None = None


def meta(version: Version, billed_units: BilledUnits | None = None) -> Meta:
    """The usual `meta`."""
    return Meta(ApiVersion(version), billed_units)
