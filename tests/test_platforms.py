"""What only some systems have is not needed: locks, handles of folders, `resource`, `os.sysconf`."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from folders import label_rows, model_folder, write_rows

import tezo

SOURCE = Path(tezo.__file__).parent

# As on Windows, for what the library asks: libraries that it uses have their own ways there.
WITHOUT_POSIX = """
import sys, os
import datasets, peft, psutil, shutil, torch, transformers
import fcntl as posix_fcntl
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
del os.sysconf, os.fork, os.O_NOFOLLOW, os.O_NONBLOCK, os.O_CLOEXEC
system_open, system_sync = os.open, os.fsync

def open_file(path, flags, *more, **named):
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", str(path))
    return system_open(path, flags, *more, **named)

def sync_file(handle):
    if posix_fcntl.fcntl(handle, posix_fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(9, "Bad file descriptor")
    system_sync(handle)

os.open, os.fsync = open_file, sync_file
shutil._use_fd_functions = False
from tezo.cli.main import main
for arguments in {commands!r}:
    try:
        main(arguments)
    except SystemExit as stop:
        if stop.code:
            raise
"""


@pytest.mark.slow
def test_a_run_needs_nothing_that_windows_lacks(tmp_path):
    rows = str(write_rows(tmp_path / "rows.jsonl", label_rows(24)))
    base, run = str(model_folder(tmp_path, "opt")), str(tmp_path / "run")
    small = ["--steps", "4", "--lr", "0.01", "--set", "train.batch_size=4", "--set", "method.rank=2", "--json"]
    commands = [
        ["train", "--model", base, "--data", rows, "--output", run, *small],
        ["train", "--output", run, "--resume", "--json"],
        ["export", run, "--output", str(tmp_path / "out")],
        ["predict", run, "--input", rows, "--output", str(tmp_path / "answers.jsonl")],
        ["doctor", "--json"],
    ]
    script = WITHOUT_POSIX.replace("{commands!r}", repr(commands))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run/summary.json").read_text())["peak_memory"] > 0
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 24
    assert (tmp_path / "out/adapter_model.safetensors").is_file()


ONLY_POSIX = {"fcntl", "resource", "pwd", "grp", "termios", "pty", "posix", "syslog", "crypt"}
ONLY_POSIX_NAMES = {
    "os": {"fork", "getuid", "geteuid", "getgid", "sched_getaffinity", "killpg", "setsid", "mkfifo", "getpgid", "nice"},
    "signal": {"SIGKILL", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGALRM", "alarm", "setitimer", "pthread_kill"},
}


def unguarded(path: Path) -> list[str]:
    """Imports of modules that some systems lack outside of `try`, and uses of such names."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tried = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.Try) for inner in ast.walk(node)}
    found = []
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        lacking = ONLY_POSIX & set(names)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            lacking = {node.attr} & ONLY_POSIX_NAMES.get(node.value.id, set())
        if lacking and id(node) not in tried:
            found.append(f"{path.name}:{node.lineno}: {lacking.pop()}")
    return found


def test_no_module_imports_what_some_systems_lack():
    assert [fault for path in SOURCE.rglob("*.py") for fault in unguarded(path)] == []


def test_the_scan_sees_imports_and_names(tmp_path):
    file = tmp_path / "a.py"
    file.write_text("import fcntl\ntry:\n    import resource\nexcept ImportError:\n    pass\nimport os\nos.fork()\n")
    assert unguarded(file) == ["a.py:1: fcntl", "a.py:7: fork"]
