"""Not a test: two hosts on this machine, which are network namespaces with a link between them, and a rank on each."""

from __future__ import annotations

import ctypes
import datetime
import os
import platform
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.parallel.processes import rank_context

HOSTS = ("host-a", "host-b")
PORT = 29500
GLOO_TIMEOUT = 6.0
_CLONE_NEWUTS, _CLONE_NEWNET = 0x04000000, 0x40000000


class Hosts:
    """Two network namespaces; `name` tells those of several tests apart."""

    def __init__(self, name: str) -> None:
        self.spaces = (f"{name}a", f"{name}b")
        self.links = (f"{name}x", f"{name}y")

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def cut(self) -> None:
        """Take the link down, as a host that loses its power or network."""
        ip("-n", self.spaces[1], "link", "set", self.links[1], "down")

    def enter(self, host: int) -> None:
        """Move this thread, and those that it starts, to a host."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.spaces[host]}") as space:
            done = libc.setns(space.fileno(), _CLONE_NEWNET) or libc.unshare(_CLONE_NEWUTS)
        assert done == 0, os.strerror(ctypes.get_errno())
        socket.sethostname(HOSTS[host])
        platform._uname_cache = None  # type: ignore[attr-defined]  # read by the process that this one is forked from
        os.environ["GLOO_SOCKET_IFNAME"] = self.links[host]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Create two hosts. Raises OSError or CalledProcessError where this process may not."""
    hosts = Hosts(f"v4{os.getpid() % 10**6}")
    try:
        for space in hosts.spaces:
            ip("netns", "add", space)
        (a, b), (x, y) = hosts.spaces, hosts.links
        ip("link", "add", x, "netns", a, "type", "veth", "peer", "name", y, "netns", b)
        for host, (space, link) in enumerate(zip(hosts.spaces, hosts.links, strict=True)):
            ip("-n", space, "addr", "add", f"{hosts.address(host)}/24", "dev", link)
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "link", "set", link, "up")
        yield hosts
    finally:
        for space in hosts.spaces:
            with suppress(OSError, subprocess.SubprocessError):
                ip("netns", "del", space)


def run_scene(hosts: Hosts, scene: str, folder: Path, port: int) -> list[str]:
    """Run a function of `host_scenes` on a rank of each host; return what each wrote, or "nothing written"."""
    processes = [
        rank_context().Process(target=_rank, args=(hosts, host, scene, str(folder), port)) for host in range(2)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 60
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()
    files = [folder / f"{scene}-{host}" for host in range(2)]
    return [file.read_text() if file.exists() else "nothing written" for file in files]


def _rank(hosts: Hosts, host: int, scene: str, folder: str, port: int) -> None:
    hosts.enter(host)
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from dsv4_compile.hf.tiny import quiet_libraries
    from tests.parallel import host_scenes

    torch.set_num_threads(1)
    quiet_libraries()
    # What `torchrun --nnodes 2 --master-addr` gives a rank.
    where = {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": str(port), "RANK": str(host), "WORLD_SIZE": "2"}
    os.environ.update(where)
    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=GLOO_TIMEOUT))
    run: Any = getattr(host_scenes, scene)
    begin = time.monotonic()
    try:
        run(init_device_mesh("cpu", (2,)), hosts)
        text = "passed"
    except Exception as fault:
        text = f"{type(fault).__name__} after {time.monotonic() - begin:.0f} s: {fault}"
    Path(folder, f"{scene}-{host}").write_text(text)
    os._exit(0)
