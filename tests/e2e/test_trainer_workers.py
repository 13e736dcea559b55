# SPDX-License-Identifier: Apache-2.0
"""Trainers' own worker extensions, from their packages, bring weights to an engine."""

import pytest

from .scenarios import SECONDS, run_scenario
from .trainer_packages import TRAINERS

PACKAGES = {
    "verl": "verl",
    "openrlhf": "openrlhf",
    "skyrl": "skyrl",
    "checkpoint_engine": "checkpoint_engine",
}
CASES = [(name, ranks) for name in PACKAGES for ranks in (1, 2)]
pytestmark = [pytest.mark.full, pytest.mark.timeout(SECONDS + 60)]


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_a_trainers_own_worker_updates_the_engine(
    name: str, ranks: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Three updates; then one that is refused, and one more. A trainer that dies in an update leaves what was served."""
    if not (TRAINERS / PACKAGES[name]).is_dir():
        pytest.skip(f"needs {name}: scripts/setup_env.py --beside")
    folder = tmp_path_factory.mktemp(f"{name}-{ranks}")
    facts = run_scenario("trainers_scenario.py", folder, name, str(ranks))
    first = 0
    if name == "verl":  # starts without weights
        assert facts["start"] == ["no-weights", []]
        assert facts["awake"] == ["serving", 16]
        assert facts["first"]
        first = 1
    assert facts["updates"] == [[first + number, True] for number in (1, 2, 3)]
    assert facts["verified"] == first + 3
    assert "non-finite" in facts["refused"]
    assert facts["untouched"]
    assert facts["afterwards"]
    if name in ("openrlhf", "skyrl"):
        assert facts["stayed"]
        assert facts["began anew"]
    elif ranks > 1:  # the workers wait in a call of the trainer's: the engine ends, and serves nothing more
        assert facts["killed"] == "-9 EngineDeadError"
        assert "(native_update_seconds): this worker ends" in (folder / "log").read_text()
