"""Wrong options are rejected by name, with the nearest names, before anything compiles."""

from __future__ import annotations

from typing import Any

import pytest

from dsv4_compile.errors import CompileError, GraphError
from dsv4_compile.options import FUSE_PASSES, Options

OPS = ("q_norm_rope", "kv_rope_insert", "inv_rope")


def _parse(options: dict[str, Any] | None = None, mode: str | None = None) -> Options:
    return Options.parse(mode, options, ops=OPS)


def test_defaults_choose_automatically_and_change_nothing_in_inductor() -> None:
    parsed = _parse()
    assert (parsed.impl, dict(parsed.demands), parsed.cudagraph, dict(parsed.inductor)) == ("auto", {}, "off", {})


def test_a_preference_a_demand_and_an_inductor_setting() -> None:
    parsed = _parse(
        {"dsv4.impl": "ir", "dsv4.impl.inv_rope": "eager", "triton.cudagraphs": False, "max-autotune": True}
    )
    assert parsed.impl == "ir"
    assert dict(parsed.demands) == {"inv_rope": "eager"}
    assert dict(parsed.inductor) == {"triton.cudagraphs": False, "max_autotune": True}


def test_a_demand_for_auto_is_no_demand() -> None:
    assert dict(_parse({"dsv4.impl.inv_rope": "auto"}).demands) == {}


def test_options_that_change_code_change_the_cache_key() -> None:
    keys = {
        _parse(options).cache_key()
        for options in (
            None,
            {"dsv4.impl": "ir"},
            {"dsv4.impl.inv_rope": "ir"},
            {"dsv4.impl.inv_rope": "eager"},
            {"dsv4.fuse": "on"},
            {"dsv4.fuse.fuse_attention": "on"},
            {"dsv4.fuse.fuse_indexer": "on"},
        )
    }
    assert len(keys) == 7


def test_fusion_is_set_for_all_passes_or_for_one() -> None:
    parsed = _parse({"dsv4.fuse": "off", "dsv4.fuse.fuse_attention": "on"})
    assert [parsed.fuse_of(name) for name in FUSE_PASSES] == ["off", "off", "on", "off", "off", "off"]
    assert {_parse().fuse_of(name) for name in FUSE_PASSES} == {"auto"}


@pytest.mark.parametrize(
    ("options", "got", "nearest"),
    [
        ({"dsv4.imp": "ir"}, "dsv4.imp", "did you mean dsv4.impl"),
        ({"dsv4.impl": "trition"}, "dsv4.impl='trition'", "did you mean triton?"),
        ({"dsv4.impl.q_norm_ropes": "ir"}, "dsv4.impl.q_norm_ropes", "did you mean dsv4.impl.q_norm_rope"),
        ({"dsv4.impl.q_norm_rope": 1}, "dsv4.impl.q_norm_rope=1", "one of auto, ir, triton, eager"),
        ({"dsv4.fuse": "yes"}, "dsv4.fuse='yes'", "one of auto, on, off"),
        ({"dsv4.fuse.fuse_preproces": "on"}, "dsv4.fuse.fuse_preproces", "did you mean dsv4.fuse.fuse_preprocess"),
        ({"dsv4.fuze": "on"}, "dsv4.fuze", "did you mean dsv4.fuse"),
        ({"dsv4.cudagraph": "ful"}, "dsv4.cudagraph='ful'", "did you mean full?"),
        ({"max_autotunes": True}, "max_autotunes", "did you mean max_autotune"),
        ({"max_autotune": "yes"}, "max_autotune='yes'", "pass bool"),
        ({"zzzzzz": 1}, "zzzzzz", "torch._inductor.list_options()"),
        ({"use_post_grad_passes": False}, "use_post_grad_passes=False", 'backend="inductor"'),
    ],
)
def test_a_wrong_option_is_e301_and_names_the_nearest(options: dict[str, Any], got: str, nearest: str) -> None:
    with pytest.raises(CompileError) as caught:
        _parse(options)
    assert caught.value.code == "E301"
    assert caught.value.got == got
    assert nearest in caught.value.fix


def test_graph_capture_and_its_settings() -> None:
    assert _parse({"dsv4.cudagraph": "trees"}).cudagraph == "trees"
    parsed = _parse({"dsv4.cudagraph": "full", "dsv4.cudagraph.max_captures": 4, "dsv4.cudagraph.debug": True})
    assert (parsed.cudagraph, dict(parsed.capture)) == ("full", {"max_captures": 4, "debug": True})


@pytest.mark.parametrize(
    ("options", "got"),
    [
        ({"dsv4.cudagraph": "full", "dsv4.cudagraph.max_capture": 4}, "dsv4.cudagraph.max_capture"),
        ({"dsv4.cudagraph": "full", "dsv4.cudagraph.max_tokens": "4"}, "dsv4.cudagraph.max_tokens='4'"),
        ({"dsv4.cudagraph": "full", "dsv4.cudagraph.max_tokens": 0}, "dsv4.cudagraph.max_tokens=0"),
        ({"dsv4.cudagraph": "full", "dsv4.cudagraph.graphs": "stand-in"}, "dsv4.cudagraph.graphs='stand-in'"),
        ({"dsv4.cudagraph": "trees", "dsv4.cudagraph.debug": True}, "dsv4.cudagraph.debug"),
    ],
)
def test_a_wrong_setting_of_captures_is_e301(options: dict[str, Any], got: str) -> None:
    with pytest.raises(CompileError) as caught:
        _parse(options)
    assert (caught.value.code, caught.value.got) == ("E301", got)


@pytest.mark.parametrize("value", ["full", "trees"])
def test_two_ways_of_capture_are_rejected(value: str) -> None:
    for mode, options in (("reduce-overhead", {}), (None, {"triton.cudagraphs": True})):
        with pytest.raises(GraphError, match="leave one out") as caught:
            _parse({"dsv4.cudagraph": value, **options}, mode=mode)
        assert caught.value.code == "E424"


def test_a_mode_sets_its_settings_and_options_override_them() -> None:
    assert dict(_parse(mode="reduce-overhead").inductor) == {"triton.cudagraphs": True}
    assert dict(_parse({"triton.cudagraphs": False}, mode="reduce-overhead").inductor) == {"triton.cudagraphs": False}
    assert dict(_parse(mode="default").inductor) == {}


def test_a_mode_without_post_grad_passes_is_rejected() -> None:
    with pytest.raises(CompileError, match="implementations are chosen in a post-grad pass"):
        _parse(mode="lite")


def test_an_unknown_mode_names_the_nearest() -> None:
    with pytest.raises(CompileError, match="did you mean max-autotune") as caught:
        _parse(mode="max-autotunes")
    assert caught.value.code == "E301"
