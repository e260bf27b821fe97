"""SIGKILLs at random moments, a third of them inside a save: every run ends as if it had been left alone.

`python tests/kills.py --kills 100 --methods METHOD ...` is the long form.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", ["tezo-cadam", "lozo-m"])
def test_no_finished_step_is_lost(method):
    script, kills = Path(__file__).parent / "kills.py", 15
    command = [sys.executable, script, "--kills", str(kills), "--methods", method]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    assert found["kills"] >= kills and found["in_save"] >= kills // 3
