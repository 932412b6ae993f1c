"""Where an endpoint is mounted, besides its own path: what clients make of it with a base URL of the other family.

OpenAI's clients are given `http://host/v1` and append `/embeddings`; Cohere's are given `http://host` and append
`/v1/embed` or `/v2/embed` (only for Cohere's own hosts do they strip a `/v1`). Given the other's base URL, the prefix
is missing or there twice. Nothing else has such a path, so the request is served: the base URL is all that a migration
changes. It costs nothing: all spellings are entries of the same tables.
"""

PREFIXES = ("/v1", "/v2")


def spellings(path: str) -> tuple[str, ...]:
    """The path, of one of the prefixes, and the others: `/v1/embed`, `/v1/v1/embed`, `/v2/v1/embed`, `/embed`.

    A path of the second version has no spelling without it, which would be the first one's.
    """
    prefix = next(prefix for prefix in PREFIXES if path.startswith(f"{prefix}/"))
    bare = (path.removeprefix(prefix),) if prefix == PREFIXES[0] else ()
    return (path, *(f"{doubled}{path}" for doubled in PREFIXES), *bare)


def base_url_hint(path: str) -> str:
    """For the error of an unknown path: how a base URL has to look, where that may be what is wrong."""
    is_ours = path.startswith(tuple(f"{prefix}/" for prefix in PREFIXES))
    is_doubled = path.startswith(tuple(f"{first}{second}/" for first in PREFIXES for second in PREFIXES))
    if is_ours and not is_doubled:
        return ""
    return "; an OpenAI client's base_url must end in /v1, once, and a Cohere client's has no /v1"
