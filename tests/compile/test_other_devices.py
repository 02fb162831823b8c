"""Nothing in the library assumes the CPU: the rule table and the modules on devices that are not there.

See `other_devices.py` for the parts, each of which is a process.
"""

import os
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes
COMPILER = shutil.which(os.environ.get("CXX", "c++"))


@pytest.mark.parametrize(("part", "least"), [("rules", 580), ("forward", 64), ("backward", 64)])
def test_programs_run_on_devices_that_are_not_there(part, least):
    if part != "backward" and COMPILER is None:
        pytest.skip("a device guard is compiled")
    command = [sys.executable, "-m", "tests.compile.other_devices", part]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    *failures, last = done.stdout.splitlines() or [done.stderr[-2000:]]
    assert done.returncode == 0, last
    assert not failures
    assert int(last.split()[0]) >= least
