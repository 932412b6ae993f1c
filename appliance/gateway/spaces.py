"""Which space an answer's vectors are in, as a caller can keep and compare it: vectors of two spaces must not meet."""

import hashlib
from functools import lru_cache

from appliance.errors import FingerprintMismatch
from appliance.gateway.http import Headers, Request

FINGERPRINT_DIGITS = 16


@lru_cache(maxsize=1024)
def fingerprint(space: str) -> str:
    """Short enough for a column beside the vectors; made of all that `space` says."""
    return hashlib.sha256(space.encode()).hexdigest()[:FINGERPRINT_DIGITS]


def space_headers(request: Request, space: str) -> Headers:
    """The answer's headers. Raises FingerprintMismatch where the client expects vectors of another space."""
    if not space:
        return []
    own = fingerprint(space)
    expected = request.header(b"x-appliance-expect-fingerprint")
    if expected is not None and expected.strip().lower() != own.encode():
        raise FingerprintMismatch(
            f"the vectors are of the space {own} ({space}), not of the expected one; embed the stored texts again, or "
            "ask for the model that embedded them",
            param="x-appliance-expect-fingerprint",
        )
    return [(b"x-appliance-space", space.encode("ascii", "replace")), (b"x-appliance-fingerprint", own.encode())]
