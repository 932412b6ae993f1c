"""The node's side of texts: jobs to prompts and grammars, tokens to what clients read. No runtime, no torch.

node.py           pulls jobs, begins their sequences, sends on what the engine writes
engine.py         the engine process, as the node sees it
open_text.py      what has come of a job so far
writer.py         one model's reading and writing: the entrance to the rest, which is pure
messages.py       OpenAI's chat messages as templates take them
chat_template.py  the model's own template, in a sandbox
prompt_ids.py     prompts to tokens, where a client's text stays text
decisions.py      questions to prompts of which one token is the answer
token_bytes.py    what each token of a vocabulary stands for
text_stream.py    tokens to text that is safe to send: whole characters, no part of a stop string
tool_styles.py    how families of models write function calls
call_parser.py    text to text, reasoning and function calls, as they come
schemas.py        JSON schemas: what is refused, left out, or narrowed before they are compiled
grammars.py       what may be written, as llguidance takes it
"""
