"""The whole chain by the command, on real digits: run once, in a network without an outside, for many."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

RECIPE = Path(__file__).parent / "chain_recipe.yaml"
HPML = Path(sys.executable).with_name("hpml")
# For another whole chain that is not about its figures, nor about how quiet the machine is.
QUICK = [
    word
    for setting in (
        "peaks={gemm_sizes: [64], rounds: 5, time_budget_s: 1, max_spread: 10}",
        "diagnose.seconds=0.1",
        "benchmark={rounds: 5, launches: 2, slice_ms: 2, precision: 0.9, batch_sizes: [1]}",
        "benchmark.scenarios=[]",
        "benchmark.concurrency=[]",
        "benchmark.quiet={max_waited: 1000000, max_stolen: 1000000}",
    )
    for word in ("--set", setting)
]

# In a network namespace of its own: a loopback, and a default route to nowhere over a pair of interfaces.
# Every attempt to reach anything, a name server included, is at least an ARP packet that the pair counts.
_ALONE = """
set -e
ip link set lo up
ip link add probe0 type veth peer name probe1
for name in probe0 probe1; do echo 1 > /proc/sys/net/ipv6/conf/$name/disable_ipv6; done
ip addr add 198.18.0.1/24 dev probe0
ip link set probe1 up
ip link set probe0 up
ip route add default dev probe0
count() { awk '/probe0:/ { print $11 }' /proc/net/dev; }
status=0; "$@" || status=$?
echo "chain $(count)" > "$PACKETS"
timeout 2 "$PYTHON" -c "import socket; socket.socket(2, 2).sendto(b'x', ('198.18.7.7', 9))" || true
sleep 0.2
echo "control $(count)" >> "$PACKETS"
exit $status
"""


@dataclass(frozen=True)
class Command:
    """Runs `hpml` in a folder of its own, on the workspace of the chain."""

    folder: Path
    home: Path

    def __call__(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self._run([str(HPML), *arguments], **env)

    def without_network(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The same, where nothing but a loopback is to be reached; `packets` then tells who tried."""
        alone = ["unshare", "--net", "--map-root-user", "sh", "-c", _ALONE, "sh", str(HPML), *arguments]
        return self._run(alone, PYTHON=sys.executable, PACKETS=str(self._packets), ORT_DISABLE_TELEMETRY="0")

    @property
    def packets(self) -> dict[str, int]:
        """How many left for the outside: of the "chain", and with those of a "control" that wanted to."""
        counts = (line.split() for line in self._packets.read_text().splitlines())
        return {name: int(count) for name, count in counts}

    @property
    def _packets(self) -> Path:
        return self.folder / "packets.txt"

    def _run(self, command: list[str], **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.folder,
            env={**os.environ, "HPML_HOME": str(self.home), "COLUMNS": "80", **env},
            capture_output=True,
            text=True,
            timeout=550,
        )


@dataclass(frozen=True)
class Chain:
    """The command, and what the first run of the chain answered."""

    hpml: Command
    first: subprocess.CompletedProcess[str]


def run_chain(folder: Path) -> Chain:
    """Run it in `folder`; without a network, where this machine can do that."""
    command = Command(folder, folder / "runs")
    run = command.without_network if may_make_networks() else command
    return Chain(command, run("run", str(RECIPE)))


@cache
def may_make_networks() -> bool:
    """Whether unshare and iproute2 are here, with the right to use them."""
    if not (shutil.which("unshare") and shutil.which("ip")):
        return False
    command = ["unshare", "--net", "--map-root-user", "ip", "link", "add", "probe0", "type", "veth"]
    return subprocess.run(command, capture_output=True).returncode == 0
