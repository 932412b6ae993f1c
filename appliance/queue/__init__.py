"""Owns how jobs get from a gateway to a node and answers back: ports (`base`), JetStream, and the same in memory.

Must not know HTTP, models, tokens or batches: payloads are bytes. `jetstream.py` alone imports nats.
"""
