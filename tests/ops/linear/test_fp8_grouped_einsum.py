from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4_compile.errors import InputError
from dsv4_compile.ops.attention.inv_rope import inv_rope, inv_rope_fp8_quant
from dsv4_compile.ops.linear.fp8_grouped_einsum import fp8_grouped_einsum
from dsv4_compile.testing import assert_bitwise, check_op, padded, strided

E8M0 = torch.float8_e8m0fnu


def e4m3(*shape: int) -> Tensor:
    return (torch.randn(shape) * 20).to(torch.float8_e4m3fn)


def powers(*shape: int) -> Tensor:
    return 2.0 ** torch.randint(-9, -2, shape).float()


def problem(tokens: int, groups: int, rows: int, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """a, a_scale, b, b_scale with power-of-two scales."""
    strips = -(-size // 128)
    a, b = e4m3(tokens, groups, size), e4m3(groups * rows, size)
    return a, powers(tokens, groups, strips), b, powers(-(-groups * rows // 128), strips)


def exact(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> tuple[Tensor, Tensor]:
    """float64, one output at a time, and the sum of magnitudes that bounds the error of any order of summation."""
    tokens, groups, size = a.shape
    rows = b.shape[0] // groups
    z, magnitude = torch.empty(2, tokens, groups, rows, dtype=torch.float64)
    strip = torch.arange(size) // 128
    for t in range(tokens):
        for g in range(groups):
            x = a[t, g].double() * a_scale[t, g].double()[strip]
            for n in range(rows):
                w = b[g * rows + n].double() * b_scale[(g * rows + n) // 128].double()[strip]
                z[t, g, n], magnitude[t, g, n] = (x * w).sum(), (x * w).abs().sum()
    return z, magnitude


def assert_rounded_once(got: Tensor, want: Tensor, magnitude: Tensor, size: int) -> None:
    half_ulp = torch.exp2(want.abs().clamp_min(1e-30).log2().floor() - 8)
    assert ((got.double() - want).abs() <= half_ulp + size * 2**-24 * magnitude).all()


@pytest.mark.parametrize(
    ("tokens", "groups", "rows", "size"),
    [
        pytest.param(5, 2, 128, 256, id="whole blocks"),
        pytest.param(1, 3, 40, 128, id="a block spans groups"),
        pytest.param(4, 1, 130, 200, id="partial blocks"),
    ],
)
def test_products_are_exact_up_to_the_sum(tokens: int, groups: int, rows: int, size: int) -> None:
    arguments = problem(tokens, groups, rows, size)
    got = fp8_grouped_einsum(*arguments)
    assert (got.dtype, got.shape) == (torch.bfloat16, (tokens, groups, rows))
    assert got.is_contiguous()
    assert_rounded_once(got, *exact(*arguments), size)


def test_weight_scales_of_float32_need_not_be_powers_of_two() -> None:
    a, a_scale, b, b_scale = problem(3, 2, 64, 256)
    b_scale = b_scale * torch.rand_like(b_scale)
    assert_rounded_once(fp8_grouped_einsum(a, a_scale, b, b_scale), *exact(a, a_scale, b, b_scale), 512)


def test_every_form_of_the_weight_scale_gives_the_same_result() -> None:
    a, a_scale, b, b_scale = problem(3, 2, 64, 256)
    want = fp8_grouped_einsum(a, a_scale, b, b_scale)
    assert_bitwise(fp8_grouped_einsum(a, a_scale, b, b_scale.to(E8M0)), want)
    assert_bitwise(fp8_grouped_einsum(a, a_scale, b, b_scale.to(E8M0).view(torch.uint8)), want)


@pytest.mark.parametrize("heads", [2, 8, 10], ids=["a quarter word", "one word", "two words"])
@pytest.mark.parametrize("groups", [1, 2])
def test_packed_and_float32_activation_scales_give_the_same_result(heads: int, groups: int) -> None:
    table = torch.randn(9, 16)
    o, positions = torch.randn(5, groups * heads, 64).bfloat16(), torch.arange(5)
    _, _, b, b_scale = problem(1, groups, 64, heads * 64)
    plain = fp8_grouped_einsum(*inv_rope_fp8_quant(o, positions, table, groups, heads), b, b_scale)
    packed = fp8_grouped_einsum(*inv_rope_fp8_quant(o, positions, table, groups, heads, True), b, b_scale)
    assert_bitwise(packed, plain)


def test_quantised_projection_stays_close_to_the_unquantised_one() -> None:
    angle = torch.rand(16, 8)
    table = torch.cat((angle.cos(), angle.sin()), dim=1)
    o, positions = torch.randn(16, 8, 64).bfloat16(), torch.arange(16)
    _, _, b, b_scale = problem(1, 2, 64, 256)
    got = fp8_grouped_einsum(*inv_rope_fp8_quant(o, positions, table, 2, 4), b, b_scale).double()
    weight = b.double() * b_scale.double().repeat_interleave(128, 0)[:128].repeat_interleave(128, 1)
    x = inv_rope(o.float(), positions, table).double().view(16, 2, 256)
    want = torch.stack([x[:, g] @ weight[64 * g : 64 * g + 64].t() for g in range(2)], dim=1)
    # e4m3 has a relative RMS error of about 2^-4 / sqrt(12) = 1.8 %, hence 1 - cosine near 1.8 %^2 / 2 = 1.6e-4.
    assert torch.cosine_similarity(got.flatten(), want.flatten(), dim=0) > 1 - 6e-4


def test_op_keeps_its_promises() -> None:
    a, a_scale, b, b_scale = problem(5, 2, 64, 256)
    table = torch.randn(9, 16)
    quantised = inv_rope_fp8_quant(torch.randn(5, 8, 64), torch.arange(5), table, 2, 4)
    packed = inv_rope_fp8_quant(torch.randn(5, 8, 64), torch.arange(5), table, 2, 4, True)
    check_op(
        fp8_grouped_einsum,
        [
            (a, a_scale, b, b_scale),
            (*quantised, b, b_scale.to(E8M0)),
            (*packed, b, b_scale.to(E8M0).view(torch.uint8)),
            (strided(a), strided(a_scale), padded(b), padded(b_scale)),
            (a[:1], a_scale[:1], b, b_scale),
            (a[:0], a_scale[:0], b, b_scale),
        ],
    )


def test_one_graph_quantises_and_projects_every_token_count() -> None:
    _, _, b, b_scale = problem(1, 2, 64, 256)
    table = torch.randn(9, 16)

    def step(o: Tensor, positions: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
        return fp8_grouped_einsum(*inv_rope_fp8_quant(o, positions, table, 2, 4), b, b_scale).flatten(1) * 2

    compiled = torch.compile(step, backend="inductor", fullgraph=True)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (5, 2, 8):
            o, positions = torch.randn(tokens, 8, 64).bfloat16(), torch.randint(0, 9, (tokens,))
            torch._dynamo.mark_dynamic(o, 0)
            torch._dynamo.mark_dynamic(positions, 0)
            assert_bitwise(compiled(o, positions, b, b_scale), step(o, positions, b, b_scale), strides=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a": torch.zeros(4, 2, 256)}, r"a \[T, G, K\]"),
        ({"a_scale": torch.ones(4, 2, 3)}, "one scale per strip of 128"),
        ({"a_scale": torch.ones(4, 2, 2, dtype=torch.int32)}, "one scale per strip of 128"),
        ({"a_scale": torch.ones(4, 1, 2)}, "the groups of a"),
        ({"a_scale": torch.ones(3, 2, 2)}, "the tokens of a"),
        ({"b": e4m3(128, 128)}, "the K of a"),
        ({"b": e4m3(127, 256)}, "divide into groups"),
        ({"b_scale": torch.ones(2, 2)}, "one scale per block"),
        ({"b_scale": torch.ones(1, 2).bfloat16()}, "b_scale"),
    ],
)
def test_wrong_arguments_are_refused(changes: dict[str, Tensor], message: str) -> None:
    arguments = dict(zip(("a", "a_scale", "b", "b_scale"), problem(4, 2, 64, 256), strict=True))
    with pytest.raises(InputError, match=rf"(?s)\[E201\].*{message}"):
        fp8_grouped_einsum(*{**arguments, **changes}.values())
