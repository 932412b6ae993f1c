"""Fixtures that every folder of tests may use."""

from tests.nats import nats_server

__all__ = ["nats_server"]
