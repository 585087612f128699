"""Send hostile requests to a captured running batch on a GPU: `python tests/gpu/hostile_requests.py`, a minute.

Temperatures that float32 cannot divide by, prompts of NaN and infinity, odd top-k and top-p, and cancelled requests run
between good ones. Good ones keep their tokens when logits move by more than GEMMs of other sizes round; they get the
tokens that they get alone in the same captured batch. The steps are captured graphs of the compiled model. Prints a
line for each check, and exits with 1 if one fails; a device assertion would end the process.
"""

from __future__ import annotations

import logging
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a checkout that is not installed

from dsv4_compile import hf
from dsv4_compile.hf.serving.sampling import NO_TOKEN, RequestSampling, choose_tokens
from dsv4_compile.hf.tiny import quiet_libraries
from tests.hf.serving import BAD_TOKEN, HUGE_TOKEN, damaged, good

MOVED = 5e-3
"""Distance that logits are moved: more than float32 sums of other sizes differ, TF32 excluded."""
REQUESTS = 120
HOSTILE: list[dict[str, Any]] = [
    *({"temperature": t} for t in (1e-45, 1e-39, 1e-38, 1e-30, 1e30, 1.7e308)),
    *({"temperature": 1.0, "top_k": k} for k in (1, 10**6, 10**400)),
    *({"temperature": 1.0, "top_p": p} for p in (1e-300, 1e-9, 1 - 1e-16)),
]


@torch.no_grad()
def is_robust(model: Any, ids: list[int], tokens: list[int], options: dict[str, Any]) -> bool:
    """Return whether the tokens stay the same for logits that move."""
    logits = model(torch.tensor([ids + tokens[:-1]], device="cuda")).logits[0, len(ids) - 1 :].float()
    sampling = RequestSampling(**{name: value for name, value in options.items() if name != "max_new_tokens"})
    numbers = torch.tensor([sampling.draw() for _ in tokens], dtype=torch.float64, device="cuda")
    moved = (logits + MOVED * torch.randn_like(logits) for _ in range(8))
    return all(choose_tokens(moved_logits, numbers).tolist() == tokens for moved_logits in moved)


def check_choices() -> bool:
    """Choose from hostile logits on the device, and compare with the same on a CPU."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(400, 1000, generator=generator)
    for value in (torch.nan, torch.inf, -torch.inf):
        rows, columns = (torch.randint(0, n, (60,), generator=generator) for n in logits.shape)
        logits[rows, columns] = value
    logits[5] = -torch.inf
    drawn = [RequestSampling(**HOSTILE[i % len(HOSTILE)], seed=i).draw() for i in range(len(logits))]
    numbers = torch.tensor(drawn, dtype=torch.float64)
    want, got = choose_tokens(logits, numbers), choose_tokens(logits.cuda(), numbers.cuda()).cpu()
    same = (want == got).float().mean().item()
    print(f"choices from hostile logits: {same:.4f} as on a CPU, {int((got == NO_TOKEN).sum())} rows without a token")
    return same > 0.99 and torch.equal(want == NO_TOKEN, got == NO_TOKEN) and bool((got < 1000).all())


def main() -> int:
    """Run all checks; return the exit status."""
    quiet_libraries()
    logging.getLogger("dsv4_compile.hf").setLevel(logging.CRITICAL)  # of requests that fail on purpose
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    started, rng, right = time.perf_counter(), random.Random(3), check_choices()
    model = damaged(device="cuda")
    batch = hf.RunningBatch(model, slots=8, prefill_chunk=64, backend="dsv4")
    pool: list[tuple[list[int], dict[str, Any], list[int]]] = []
    for seed in range(60):
        ids, options = good(rng.randint(1, 90), seed), {"max_new_tokens": rng.randint(2, 8)}
        options |= {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "seed": seed} if seed % 2 else {}
        tokens = list(batch.submit(ids, **options))
        if is_robust(model, ids, tokens, options):
            pool.append((ids, options, tokens))
    print(f"{len(pool)} of 60 requests alone, {time.perf_counter() - started:.0f} s, {batch.statistics}")
    served: list[tuple[hf.Request, list[int]]] = []
    bad: list[hf.Request] = []
    for i in range(REQUESTS):
        ids, options, want = rng.choice(pool)
        served.append((batch.submit(ids, **options), want))
        poison, sampled = rng.choice([BAD_TOKEN, HUGE_TOKEN]), {"temperature": 0.8} if i % 2 else {}
        bad.append(batch.submit([*good(rng.randint(0, 80), i), poison], max_new_tokens=6, **sampled))
        # Its last token may attend to none of the poisoned rows, but its caches hold them.
        batch.submit([poison, *good(rng.randint(1, 80), i)], max_new_tokens=6, **sampled)
        odd = batch.submit(good(rng.randint(1, 60), i), max_new_tokens=6, **HOSTILE[i % len(HOSTILE)])
        batch.step()
        if i % 5 == 0:
            odd.cancel()
    batch.run()
    torch.cuda.synchronize()
    wrong = [(request, want) for request, want in served if request.tokens != want or request.state != "length"]
    failed = sum(request.state == "failed" and request.error.code == "E211" for request in bad)  # type: ignore[union-attr]
    print(f"{len(served) - len(wrong)} of {len(served)} good requests have the tokens that they have alone")
    print(f"{failed} of {len(bad)} requests of NaN or infinity failed, each with E211")
    for request, want in wrong[:3]:
        print("wrong:", request, request.tokens, want)
    print(f"{batch.statistics}, {time.perf_counter() - started:.0f} s")
    replayed = batch.statistics.captures > 0 and batch.statistics.replays > REQUESTS
    right &= len(pool) > 10 and not wrong and failed == len(bad) and replayed and batch.idle
    print("right" if right else "WRONG")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
