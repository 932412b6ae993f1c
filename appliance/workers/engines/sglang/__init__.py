"""SGLang as an engine: its isolated environment, and the process that stands between it and a node.

    environment.py  where the environment lies, whether it is complete and up to date
    install.py      builds and removes it
    command.py      the command by which a node starts the engine
    host.py         that process: adapter.py answers the node's frames,
                    server.py starts SGLang and ends it, launch.py says with what,
                    client.py asks it, flags.py, asking.py and answers.py translate (pure),
                    loras.py keeps its adapters, lora_files.py looks at their files first
    inside/         files that run in SGLang's own processes

Nothing here imports SGLang except `inside/`; the node's interpreter needs none of its packages.
"""
