"""Not a test: what ranks of two hosts do in tests."""

from __future__ import annotations

import copy
import os
import time
from typing import Any

import torch

from dsv4_compile import hf
from dsv4_compile.hf.tiny import tiny_model
from tests.parallel.ways import MODEL, SIZES

IDS = torch.randint(1, 512, (2, 20), generator=torch.Generator().manual_seed(0))
NEW_TOKENS = 6


def generate(model: Any) -> torch.Tensor:
    tokens: torch.Tensor = model.generate(IDS, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    return tokens


def split(mesh: Any) -> Any:
    return hf.convert(tiny_model(**MODEL), **SIZES, mesh=mesh)


def both_generate_and_serve(mesh: Any, hosts: Any) -> None:
    whole = hf.convert(copy.deepcopy(tiny_model(**MODEL)), **{k: v for k, v in SIZES.items() if k != "rank_timeout"})
    model = split(mesh)
    expected = generate(whole)
    assert torch.equal(generate(model), expected)
    with hf.RunningBatch(model, slots=2, prefill_chunk=16) as batch:
        if mesh.get_rank():
            batch.serve()
        else:
            requests = [batch.submit(row, max_new_tokens=NEW_TOKENS) for row in IDS]
            batch.run()
            assert [request.tokens for request in requests] == expected[:, -NEW_TOKENS:].tolist()


def the_second_host_is_gone(mesh: Any, hosts: Any) -> None:
    model = split(mesh)
    generate(model)
    if mesh.get_rank():
        os._exit(9)
    generate(model)


def the_link_is_cut(mesh: Any, hosts: Any) -> None:
    model = split(mesh)
    generate(model)
    if mesh.get_rank() == 0:
        hosts.cut()
    generate(model)


def the_first_host_is_gone_while_the_other_serves(mesh: Any, hosts: Any) -> None:
    model = split(mesh)
    batch = hf.RunningBatch(model, slots=2, prefill_chunk=16)
    if mesh.get_rank():
        batch.serve()
    else:
        request = batch.submit(IDS[0], max_new_tokens=NEW_TOKENS)
        batch.run()
        assert len(request.tokens) == NEW_TOKENS
        time.sleep(1)
        os._exit(9)
