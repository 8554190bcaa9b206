"""Nodes of a cluster on one machine: each a network namespace of its own on a switch where its cable can be pulled.

Linux and root; nothing of the machine's own network is touched, and all is gone with the namespaces.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType

LINK = "unfog0"
"""The network of a node, as it sees it."""


class Nodes:
    """`count` nodes with addresses of one network, from 0; inside the `with` only."""

    def __init__(self, count: int):
        self.count = count
        self._prefix = f"unfog-{os.getpid()}"

    def __enter__(self) -> Nodes:
        hub = self._name("hub")
        try:
            ip("netns", "add", hub)
            ip("-n", hub, "link", "add", "switch", "type", "bridge")
            ip("-n", hub, "link", "set", "switch", "up")
            for node in range(self.count):
                name = self._name(node)
                ip("netns", "add", name)
                ip("-n", hub, "link", "add", f"port{node}", "type", "veth", "peer", "name", LINK, "netns", name)
                ip("-n", hub, "link", "set", f"port{node}", "master", "switch", "up")
                ip("-n", name, "addr", "add", f"{self.address(node)}/24", "dev", LINK)
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "link", "set", LINK, "up")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def address(self, node: int) -> str:
        """Of a node, for the others."""
        return f"10.77.0.{node + 1}"

    def on(self, node: int, words: Sequence[str]) -> list[str]:
        """Words that run these on a node, which is called node0, node1, … there."""
        named = f'hostname node{node}; exec "$@"'
        return ["ip", "netns", "exec", self._name(node), "unshare", "--uts", "sh", "-c", named, "-", *words]

    def torchrun(self, node: int, nnodes: str, words: Sequence[str], restarts: int = 0) -> list[str]:
        """Words that start one process on a node by torchrun; node 0 is where they meet."""
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.address(0)}:29400", "--rdzv-id", self._prefix]
        here = ["--local-addr", self.address(node), "--rdzv-conf", f"is_host={int(node == 0)}"]
        size = ["--nnodes", nnodes, "--nproc-per-node", "1", "--max-restarts", str(restarts)]
        words = ["-m", "torch.distributed.run", *size, *meeting, *here, *words]
        return self.on(node, ["env", f"GLOO_SOCKET_IFNAME={LINK}", sys.executable, *words])

    def plug(self, node: int, there: bool) -> None:
        """Pull a node's cable at the switch, or put it back: the node itself hears nothing but silence."""
        ip("-n", self._name("hub"), "link", "set", f"port{node}", "up" if there else "down")

    def _name(self, node: int | str) -> str:
        return f"{self._prefix}-{node}"

    def _remove(self) -> None:
        for node in (*range(self.count), "hub"):
            subprocess.run(["ip", "netns", "del", self._name(node)], stderr=subprocess.DEVNULL, check=False)


def ip(*words: str) -> str:
    """What `ip` says. OSError or CalledProcessError, with its reason, where it may not."""
    return run("ip", *words)


def run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def missing() -> str:
    """Why there can be no nodes here; "" if there can."""
    try:
        with Nodes(1) as nodes:
            run(*nodes.on(0, ["true"]))
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces here: {str(getattr(error, 'stderr', '') or error).strip()}"
    return ""
