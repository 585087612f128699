"""Not a test: what the tests of a run ask for, so that a fixture of a file builds that alone."""

from __future__ import annotations

import pytest


def values_of(name: str, request: pytest.FixtureRequest) -> list[str]:
    """Return the values of parameter `name` of this run's tests in the file of `request`, sorted."""
    tests = (item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function))
    calls = (test.callspec for test in tests if hasattr(test, "callspec"))
    return sorted({call.params[name] for call in calls if name in call.params})
