"""Runs the cases of this folder in a process of its own, whose Hub is the stand-in.

The Hub's clients read their environment when they are imported: `python -m tests.hub.run REPORT.xml SCRATCH`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.hub.server import WRITER, Hub, running

HERE = Path(__file__).parent
CASES = sorted(HERE.glob("cases_*.py"))


class _Endpoint(str):
    """The viewer of datasets would be looked for on a host of its own, whose name leads nowhere."""

    def replace(self, *_: Any) -> str:
        """Stay."""
        return str(self)


def main(report: str, scratch: str) -> int:
    """pytest's exit status."""
    with running() as hub:
        os.environ.update(
            {
                "HF_ENDPOINT": hub.endpoint,
                "HF_HOME": str(Path(scratch) / "home"),
                "HF_TOKEN": WRITER,
                "HF_HUB_DISABLE_XET": "1",
                "HF_HUB_DISABLE_TELEMETRY": "1",
                "HF_HUB_OFFLINE": "0",
                "CUDA_VISIBLE_DEVICES": "",
            }
        )
        import pytest

        class Fixtures:
            """What the cases ask for."""

            @pytest.fixture
            def hub(self, monkeypatch: pytest.MonkeyPatch) -> Hub:
                """The stand-in, without faults; the client's pauses between tries are left out."""
                from datasets.utils import _dataset_viewer
                from huggingface_hub.utils import _http

                hub.faults = []
                viewer = SimpleNamespace(HF_ENDPOINT=_Endpoint(hub.endpoint))
                monkeypatch.setattr(_dataset_viewer, "config", viewer)
                monkeypatch.setattr(_http, "time", SimpleNamespace(sleep=lambda seconds: None, time=_http.time.time))
                return hub

        options = [
            "-q",
            "-p",
            "no:cacheprovider",
            "-rP",
            "--log-level=INFO",
            f"--junitxml={report}",
        ]
        # Of huggingface_hub itself, in its upload of large files.
        options += ["-W", "ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning"]
        options += ["--override-ini=timeout=0", f"--basetemp={Path(scratch) / 'runs'}"]
        return int(pytest.main([*options, *map(str, CASES)], plugins=[Fixtures()]))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
