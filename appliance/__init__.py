"""An OpenAI-compatible inference appliance; ARCHITECTURE.md tells a request's story through these packages."""

__version__ = "0.1.0"
