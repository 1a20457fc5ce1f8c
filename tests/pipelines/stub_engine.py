"""A stand-in for podman: runs what a container would run as a process, and notes how it was called.

podman VERB ARGUMENT...    with STUB_ENGINE (a folder: calls.jsonl, containers/NAME) in the environment
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

FOLDER = Path(os.environ.get("STUB_ENGINE", "."))
IMAGES = {"hpml-test:1": "sha256:" + "1" * 64}
_WITH_VALUE = {
    "--network",
    "--tmpfs",
    "--user",
    "--cap-drop",
    "--security-opt",
    "--env",
    "--cpus",
    "--memory",
}
_WITH_VALUE |= {"--pull", "--shm-size", "--name", "--volume"}


def main(verb: str, *arguments: str) -> int:
    with (FOLDER / "calls.jsonl").open("a") as file:
        file.write(json.dumps([verb, *arguments]) + "\n")
    if verb == "info":
        return 0
    if verb == "image":
        return inspect_image(arguments[-1])
    if verb == "inspect":
        print(((FOLDER / "oom").exists() and "true") or "false")
        return 0
    if verb == "run":
        return run(list(arguments))
    if verb in ("stop", "kill"):
        pid = int((FOLDER / "containers" / arguments[-1]).read_text())
        os.kill(pid, signal.SIGTERM if verb == "stop" else signal.SIGKILL)
        return 0
    assert verb == "rm", verb
    return 0


def inspect_image(image: str) -> int:
    if image not in IMAGES:
        print(f"Error: {image}: image not known", file=sys.stderr)
        return 125
    print(IMAGES[image])
    return 0


def run(arguments: list[str]) -> int:
    environment, name = dict(os.environ), ""
    while arguments[0].startswith("--"):
        flag = arguments.pop(0)
        if flag in _WITH_VALUE:
            value = arguments.pop(0)
            if flag == "--env":
                key, _, environment[key] = value.partition("=")
            elif flag == "--name":
                name = value
    image, *command = arguments
    assert image in IMAGES, image
    if (FOLDER / "refuse").exists():
        print("Error: no space left on device", file=sys.stderr)
        return 125
    child = subprocess.Popen([sys.executable, "-m", "hpml.components", *command], env=environment)
    if name:
        (FOLDER / "containers").mkdir(exist_ok=True)
        (FOLDER / "containers" / name).write_text(str(child.pid))
    status = child.wait()
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
