"""Owns the vendors' dialects: wire bytes ⇄ tasks and events, as pure functions.

Must not know sockets, queues, event loops, models or the catalog. A dialect's quirks live here and nowhere else.
"""
