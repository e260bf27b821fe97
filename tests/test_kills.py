"""SIGKILLs at random moments, a third of them inside a save: every run ends as if it had been left alone.

`python tests/kills.py --kills 100 --methods METHOD ...` is the long form.
"""

import json

import pytest
from forks import forked


@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.parametrize("kills", [6, 15])
@pytest.mark.parametrize("method", ["tezo-cadam", "lozo-m"])
def test_no_finished_step_is_lost(method, kills):
    done = forked("kills", "--kills", kills, "--seed", 2, "--methods", method)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    assert found["kills"] >= kills and found["in_save"] >= kills // 3
