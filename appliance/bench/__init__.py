"""Owns load tests against any OpenAI-compatible base URL. Built on HTTP; must not know queues, engines or models."""
