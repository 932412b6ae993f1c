"""Why a model is left to the padded runner."""


class Unsupported(Exception):  # a fact about a model, which chooses another runner
    """This model has something that the packed stack does not implement exactly; the message names it."""
