"""Tests of a model that is split over two hosts: network namespaces of this machine, with gloo between them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parallel.hosts import HOSTS, PORT, Hosts, run_scene, two_hosts


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    try:
        context = two_hosts()
        hosts = context.__enter__()
    except (OSError, subprocess.SubprocessError) as fault:
        pytest.skip(f"this process may not create network namespaces: {fault}")
    yield hosts
    context.__exit__(None, None, None)


def test_tokens_are_those_of_one_process(hosts: Hosts, tmp_path: Path) -> None:
    assert run_scene(hosts, "both_generate_and_serve", tmp_path, PORT) == ["passed", "passed"]


@pytest.mark.parametrize(
    ("scene", "gone"), [("the_second_host_is_gone", 1), ("the_first_host_is_gone_while_the_other_serves", 0)]
)
def test_a_host_that_is_gone_is_named(hosts: Hosts, tmp_path: Path, scene: str, gone: int) -> None:
    texts = run_scene(hosts, scene, tmp_path, PORT + 1 + gone)
    assert texts[gone] == "nothing written"
    assert "E703" in texts[1 - gone] and f"rank {gone} (process" in texts[1 - gone], texts
    assert f"on {HOSTS[gone]})" in texts[1 - gone], texts


@pytest.mark.skipif("DSV4_RANKS" not in os.environ, reason="two agents of torchrun take a minute: make ranks")
def test_torchrun_on_two_nodes(hosts: Hosts) -> None:
    """Each node has two ranks, which run the example of a split model."""
    example = Path(__file__).parents[2] / "examples" / "06_tensor_parallel.py"
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    meeting = ["--master-addr", hosts.address(0), "--master-port", str(PORT + 4)]
    nodes = [
        subprocess.Popen(
            ["ip", "netns", "exec", hosts.spaces[node], *launch, *meeting, "--node-rank", str(node), str(example)],
            env=os.environ | {"GLOO_SOCKET_IFNAME": hosts.links[node], "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    try:
        outputs = [node.communicate(timeout=400)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(outputs)
    assert "rank 3: " in outputs[1] and "a RunningBatch gives the same tokens" in outputs[0]


def test_both_sides_of_a_link_that_is_cut_name_the_other(hosts: Hosts, tmp_path: Path) -> None:
    """The last test: the link stays down."""
    texts = run_scene(hosts, "the_link_is_cut", tmp_path, PORT + 3)
    for host, text in enumerate(texts):
        assert "E703" in text and f"rank {1 - host} (process" in text and f"on {HOSTS[1 - host]})" in text, texts
        assert "is not heard" in text or "has been silent" in text, texts
        assert "make the same calls" not in text, texts
