"""The one thing an engine does for a model, by the tasks that its facts name."""

from appliance.errors import StartupError
from appliance.presets import Facts

# From the tasks a preset names to what its engine is loaded for; see `wire.Load`. "generate" stands alone.
ENGINE_TASKS = {"embed": "embed", "rerank": "score", "classify": "score", "extract": "tag"}


def engine_task(facts: Facts) -> str:
    """What an engine has to do for the model's tasks. Raises StartupError for tasks that do not go together."""
    if facts.rerank_by and "embed" not in facts.tasks:
        raise StartupError(
            f'rerank_by of {facts.name} is "{facts.rerank_by}", which takes vectors; add "embed" to its tasks, or '
            "leave rerank_by out for a cross-encoder"
        )
    if facts.runtime == "spacy":
        if facts.tasks != ("extract",):
            raise StartupError(f'tasks of {facts.name} are {list(facts.tasks)}; a spaCy model serves ["extract"]')
        return "parse"
    if "generate" in facts.tasks:
        if facts.tasks != ("generate",):
            raise StartupError(
                f'tasks of {facts.name} are {list(facts.tasks)}; a model that generates does nothing else: ["generate"]'
            )
        return "generate"
    if "embed" in facts.tasks and "sparse" in facts.outputs:
        if facts.tasks != ("embed",) or facts.outputs != ("sparse",):
            raise StartupError(
                f'{facts.name} gives sparse vectors, which one engine gives alone; set its tasks to ["embed"] and its '
                'outputs to ["sparse"]'
            )
        return "sparse"
    # Likeness is computed of what the engine embeds.
    own = [task for task in facts.tasks if not (task == "rerank" and facts.rerank_by)]
    wanted = {ENGINE_TASKS[task] for task in own}
    if {"embed", "rerank"} <= set(own):
        raise StartupError(
            f'{facts.name} is to embed and to rerank; set its rerank_by to "similarity" or "maxsim", or leave one out'
        )
    if len(wanted) != 1:
        raise StartupError(
            f"tasks of {facts.name} are {list(facts.tasks)}; take one or more of {list(ENGINE_TASKS)} that one engine "
            "serves: rerank and classify go together, the others stand alone"
        )
    return wanted.pop()
