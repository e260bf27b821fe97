"""SIGKILLs at random moments, a third of them inside a save: every run ends as if it had been left alone.

`python tests/kills.py --kills 100 --methods METHOD ...` is the long form.
"""

import json

import pytest
from forks import forked


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kills", [6, pytest.param(15, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", ["tezo-cadam", pytest.param("lozo-m", marks=pytest.mark.slow)])
def test_no_finished_step_is_lost(method, kills):
    done = forked("kills", "--kills", kills, "--seed", 2, "--methods", method)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    assert found["kills"] >= kills and found["in_save"] >= kills // 3
