"""An OpenAI- and Cohere-compatible inference appliance. ARCHITECTURE.md tells a request's story through it."""

__version__ = "0.1.0"
