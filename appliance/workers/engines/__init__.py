"""Engines: the adapters that run a model on a device. Only this package imports torch and model runtimes."""
