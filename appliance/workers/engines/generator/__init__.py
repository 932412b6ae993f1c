"""The embedded generator: texts from a causal model, many at once, on the packed stack.

model.py      the stack with a head and a cache: rows of tokens in, logits out
cache.py      keys and values of the tokens that sequences have behind them, and how rows attend to them
passes.py     pure: which sequences get which rows of the next pass, and what of a prompt is known already
sampling.py   pure: logits to the next token
constraint.py a grammar's word on which tokens may come next
generator.py  the sequences under way: begin, abort, step
host.py       the process: frames in, a step after another
"""
