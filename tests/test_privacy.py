"""Nothing phones home: the whole chain with nothing but a loopback, and an interface that counts attempts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).parent / "chain_recipe.yaml"
HPML = Path(sys.executable).with_name("hpml")

# In a network namespace of its own: a loopback, and a default route to nowhere over a pair of interfaces.
# Every attempt to reach anything, a name server included, is at least an ARP packet that the pair counts.
_SCRIPT = """
set -e
ip link set lo up
ip link add probe0 type veth peer name probe1
for name in probe0 probe1; do echo 1 > /proc/sys/net/ipv6/conf/$name/disable_ipv6; done
ip addr add 198.18.0.1/24 dev probe0
ip link set probe1 up
ip link set probe0 up
ip route add default dev probe0
count() { awk '/probe0:/ { print $11 }' /proc/net/dev; }
"$@" >&2
echo "chain $(count)"
timeout 2 "$PYTHON" -c "import socket; socket.socket(2, 2).sendto(b'x', ('198.18.7.7', 9))" || true
sleep 0.2
echo "control $(count)"
"""


def _may_make_namespaces() -> bool:
    if not (shutil.which("unshare") and shutil.which("ip")):
        return False
    command = ["unshare", "--net", "--map-root-user", "ip", "link", "add", "probe0", "type", "veth"]
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.skipif(not _may_make_namespaces(), reason="needs unshare, iproute2 and the right to use them")
def test_the_chain_reaches_for_nothing_outside(tmp_path: Path) -> None:
    command = [str(HPML), "run", str(RECIPE), "--home", str(tmp_path / "runs")]
    answer = subprocess.run(
        ["unshare", "--net", "--map-root-user", "sh", "-c", _SCRIPT, "sh", *command],
        env={**os.environ, "PYTHON": sys.executable, "ORT_DISABLE_TELEMETRY": "0"},
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert answer.returncode == 0, answer.stderr
    counts = dict(line.split() for line in answer.stdout.splitlines())
    assert int(counts["chain"]) == 0
    assert int(counts["control"]) > 0
