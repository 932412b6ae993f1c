"""Owns HTTP: authentication, limits, admission, and the wait for a job's replies. The only importer of litestar.

Must not know models' files, tokens, batches or how a queue works: it speaks `compat` to the client and the ports of
`queue/base.py` to the nodes. Stateless: any number of gateways serve the same queue.
"""
