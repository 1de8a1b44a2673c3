"""The tools of the repository, as far as they can be tried in a moment."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).parents[1] / "tools"


def test_the_kill_test_makes_its_scratch_folder_and_leaves_it_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scratch = tmp_path / "not" / "there"
    words: list[Any] = ["kill_test.py", "--kills", 0, "--jobs", 1, "--scratch", scratch]
    main = runpy.run_path(str(TOOLS / "kill_test.py"))["main"]
    monkeypatch.setattr("sys.argv", [str(word) for word in words])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("os.environ", dict(os.environ))
    monkeypatch.setitem(main.__globals__, "make_cases", lambda root: {"of": root.parent})
    monkeypatch.setitem(main.__globals__, "run_all", lambda cases, *_: (cases, []))
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert f"| of | {scratch} |" in capsys.readouterr().out
    assert list(scratch.iterdir()) == []
