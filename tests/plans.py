"""Plans and recipes with some settings of a test's own."""

from dataclasses import replace
from typing import Any

from stages.core.params.schema import LearningParams, PartsParams
from stages.planning.plan import Plan


def changed(plan: Plan, **settings: Any) -> Plan:
    """The plan with other settings, each in the object of the plan that has it: recipe, memory, schedule or itself."""
    for name in ("recipe", "memory", "schedule"):
        within = getattr(plan, name)
        own = {key: settings.pop(key) for key in [*settings] if hasattr(within, key)}
        plan = replace(plan, **{name: replace(within, **own)})
    return replace(plan, **settings)


def recipe_of(*, lora: Any = None, full_targets: Any = None, **parts: Any) -> LearningParams:
    """parts: how each is trained, as in `recipe_of(vision="full", llm="lora", lora=...)`."""
    return LearningParams(task="chat", parts=PartsParams(**parts), lora=lora, full_targets=full_targets or {})
