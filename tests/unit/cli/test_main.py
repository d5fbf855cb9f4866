"""The program as its users start it: exit codes and what stands on standard error."""

from __future__ import annotations

import os
import subprocess
import sys


def test_a_reader_that_stops_reading_ends_the_program_quietly() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as output:
        done = subprocess.run(
            [sys.executable, "-m", "phloem.cli", "--help"], stdout=output, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert done.returncode == 141
    assert done.stderr == ""
