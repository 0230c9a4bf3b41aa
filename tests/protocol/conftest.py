"""Hypothesis without time limits: a busy machine is no failure."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings

settings.register_profile("kbtp", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kbtp")

# For mutants of the code (nox -s mutants): the same examples every time, and none made smaller, as nobody looks at them.
settings.register_profile("mutants", settings.default, derandomize=True, database=None, phases=(Phase.explicit, Phase.generate))
