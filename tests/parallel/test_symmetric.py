"""Tests of symmetric memory: the buffers that a group's all-reduces use."""

from __future__ import annotations

import pytest
import torch

from dsv4_compile.errors import RankError
from dsv4_compile.parallel import Ranks, boundary, symmetric
from dsv4_compile.runtime import groups

DEVICE = torch.device("cuda", 0)


def test_group_that_has_the_name_of_a_destroyed_one_gets_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    named, allocations = [object()], list[str]()
    monkeypatch.setattr(Ranks, "group", property(lambda self: named[-1]))
    monkeypatch.setattr(symmetric, "_why_unsupported", lambda ranks, device: "")
    monkeypatch.setattr(symmetric, "_rendezvous", lambda ranks, device: allocations.append("buffer") or torch.zeros(1))
    monkeypatch.setattr(symmetric, "gather_objects", lambda value, ranks: [value])
    monkeypatch.setattr(symmetric, "_buffers", {})
    monkeypatch.setattr(symmetric, "_prepared", {})
    monkeypatch.setattr(boundary, "prepare", lambda ranks, device: allocations.append("exchange"))
    ranks = Ranks(0, 2, "0")
    for _ in range(2):
        symmetric.prepare(ranks, DEVICE)
    assert allocations == ["buffer", "exchange"]
    named.append(object())  # destroy_process_group, init_process_group
    symmetric.prepare(ranks, DEVICE)
    assert allocations == ["buffer", "exchange"] * 2


def test_replay_after_one_to_which_a_rank_did_not_come_names_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        replays = 0

        def replay(self) -> None:
            self.replays += 1

        def reset(self) -> None:
            pass

    word = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(boundary, "_exchanges", {("tp", DEVICE): boundary._Exchange(1, (), word, word)})
    graph = Graph()
    replay = groups.replay_of(graph, frozenset({"tp"}), "the step")
    other = groups.replay_of(graph, frozenset({"dp"}), "another step")
    replay()
    word.fill_(1)
    with pytest.raises(RankError, match=r"E705[\s\S]*rank 0 of group tp did not come to an all-reduce of rank 1"):
        replay()
    other()
    assert graph.replays == 2
