"""Owns the node: pull, tokenize, batch, run on an engine process, reply, settle; and the engine process itself.

Must not know HTTP or a vendor's dialect. The node (`node.py` and what it imports) never imports an engine: engines live
in processes of their own behind `wire.py`, started through `host.py`.
"""
