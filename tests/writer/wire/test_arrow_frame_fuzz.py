"""Damaged Arrow frames crash nothing; tests.writer.wire.fuzz says what is done to them."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

FRAMES = 1_500


def test_damaged_frames_are_refused_or_written_and_never_end_the_process(tmp_path: Path):
    seed = random.randrange(2**32)
    last = tmp_path / "last-frame"
    command = [sys.executable, "-m", "tests.writer.wire.fuzz", str(seed), str(FRAMES), str(last)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    frame = last.read_bytes().hex() if last.exists() else ""
    assert done.returncode == 0, f"seed={seed} status={done.returncode}\n{done.stderr}\nframe={frame}"
    assert done.stdout.startswith(f"frames={FRAMES}")
