"""Encoders without padding: the texts of a batch lie end to end, and every matrix product runs over real tokens only.

    families.py    config.json of a model family → a stack of layers
    stack.py       the layers; pack.py the batch they take; attention.py and masks.py attention within each text
    linear.py      matrix products; rotary.py rotary positions; weights.py safetensors → tensors
    modules.py     pooling and what follows it, as sentence-transformers defines them
    runner.py      all of it behind the engine's `Runner`

Knows model folders and torch, nothing of frames, queues or other engines. Imports neither transformers nor
sentence-transformers: they take seconds to import, and an engine that restarts must be back at once.
"""
