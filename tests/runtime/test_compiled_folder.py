"""Compiled folders are read whole and as their manifest says, or refused before anything of them is used."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsv4_compile import DSV4Error
from dsv4_compile.runtime import compiled_folder

FILES = {"torch.bin": b"graphs", "inductor/ab/x.so": b"\x7fELF", "triton/KEY/kernel.cubin": b"", "native.so": b"ELF"}
MANIFEST = compiled_folder.MANIFEST


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    compiled_folder.write(tmp_path / "compiled", FILES, {"torch": "2.13"}, {"max_seq_len": 64})
    return tmp_path / "compiled"


def refused(folder: Path, digest: str | None = None) -> str:
    with pytest.raises(DSV4Error) as caught:
        compiled_folder.read(folder, digest)
    assert caught.value.code == "E501"
    return str(caught.value)


def with_manifest(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    return folder


def test_what_was_written_is_read(folder: Path) -> None:
    compiled = compiled_folder.read(folder)
    assert dict(compiled.files) == FILES
    assert (compiled.made_for, compiled.configuration) == ({"torch": "2.13"}, {"max_seq_len": 64})
    assert compiled_folder.read(folder, compiled.digest) == compiled


def test_a_folder_is_replaced_whole_and_others_are_left_alone(folder: Path, tmp_path: Path) -> None:
    digest = compiled_folder.write(folder, {"native.so": b"new"}, {}, {})
    assert dict(compiled_folder.read(folder, digest).files) == {"native.so": b"new"}
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter.txt").write_text("words", encoding="utf-8")
    with pytest.raises(DSV4Error, match="E501"):
        compiled_folder.write(other, FILES, {}, {})
    assert [path.name for path in other.iterdir()] == ["chapter.txt"]


def test_any_flipped_byte_is_refused(folder: Path) -> None:
    generator = random.Random(0)
    digest = compiled_folder.read(folder).digest
    for name in (*FILES, MANIFEST):
        content = (folder / name).read_bytes()
        for place in generator.sample(range(len(content)), min(20, len(content))):
            changed = bytearray(content)
            changed[place] ^= 1 << generator.randrange(8)
            (folder / name).write_bytes(changed)
            said = refused(folder, digest)
            assert name == MANIFEST or name in said
        (folder / name).write_bytes(content)
    compiled_folder.read(folder, digest)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda folder: (folder / "native.so").unlink(), "no file 'native.so'"),
    "extra": (lambda folder: (folder / "inductor/ab/y.so").write_bytes(b""), "'inductor/ab/y.so', which its manifest"),
    "longer": (lambda folder: (folder / "native.so").write_bytes(b"ELF "), "'native.so', which differs"),
    "shorter": (lambda folder: (folder / "native.so").write_bytes(b"EL"), "'native.so', which differs"),
    "no-manifest": (lambda folder: (folder / MANIFEST).unlink(), "cannot be read"),
    "no-json": (lambda folder: (folder / MANIFEST).write_bytes(b"\xff{"), "no manifest"),
    "a-list": (lambda folder: (folder / MANIFEST).write_bytes(b"[]"), "no manifest"),
    "deep": (lambda folder: (folder / MANIFEST).write_bytes(b'{"a":' * 9000 + b"1" + b"}" * 9000), "no manifest"),
    "large": (lambda folder: (folder / MANIFEST).write_bytes(b" " * (compiled_folder.MOST_MANIFEST + 1)), "more than"),
    "fifo": (lambda folder: ((folder / "native.so").unlink(), os.mkfifo(folder / "native.so")), "no plain file"),
    "manifest-fifo": (lambda folder: ((folder / MANIFEST).unlink(), os.mkfifo(folder / MANIFEST)), "no plain file"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damage_is_refused_and_named(folder: Path, case: str) -> None:
    damage, words = DAMAGES[case]
    damage(folder)
    assert words in refused(folder)


@pytest.mark.parametrize("name", ["native.so", "inductor/ab", "inductor", MANIFEST, "link"])
def test_links_are_refused(folder: Path, tmp_path: Path, name: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    if (folder / name).exists():
        (folder / name).rename(elsewhere)
    (folder / name).symlink_to(elsewhere)
    assert "link" in refused(folder)


NAMES = ["../x", "a/../../x", "/etc/passwd", "a//b", "./a", "a\\b", "", "a\nb", "x" * 300, "a/" + "y" * 256, MANIFEST]


@pytest.mark.parametrize("name", NAMES)
def test_names_that_lead_elsewhere_are_refused(folder: Path, name: str) -> None:
    def add(manifest: dict[str, Any]) -> None:
        manifest["files"][name] = manifest["files"]["native.so"]

    assert "a file named" in refused(with_manifest(folder, add))


ENTRIES: dict[str, Any] = {
    "huge": {"bytes": 1 << 60, "sha256": "0" * 64},
    "negative": {"bytes": -1, "sha256": "0" * 64},
    "a-bool": {"bytes": True, "sha256": "0" * 64},
    "no-hash": {"bytes": 3},
    "short-hash": {"bytes": 3, "sha256": "0"},
    "a-number": 3,
    "more-keys": {"bytes": 3, "sha256": "0" * 64, "mode": 511},
}


@pytest.mark.parametrize("case", ENTRIES)
def test_entries_have_a_size_within_the_limit_and_a_hash(folder: Path, case: str) -> None:
    assert "E501" in refused(
        with_manifest(folder, lambda manifest: manifest["files"].update({"native.so": ENTRIES[case]}))
    )


@pytest.mark.parametrize("key", ["format", "made_for", "configuration", "files", "more"])
def test_the_manifest_has_its_keys_and_no_others(folder: Path, key: str) -> None:
    assert MANIFEST in refused(with_manifest(folder, lambda manifest: manifest.update({key: 2})))
    if key != "more":
        assert MANIFEST in refused(with_manifest(folder, lambda manifest: manifest.pop(key)))


def test_the_digest_is_of_the_whole_folder(folder: Path) -> None:
    digest = compiled_folder.read(folder).digest
    assert digest in refused(folder, "0" * 64)
    compiled_folder.write(folder, {**FILES, "native.so": b"FLE"}, {"torch": "2.13"}, {"max_seq_len": 64})
    compiled_folder.read(folder)
    assert digest in refused(folder, digest)


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    assert "no folder" in refused(tmp_path / "nowhere")


def test_differences_are_named_with_both_values() -> None:
    difference = compiled_folder.difference
    assert difference("of", {"a": {"b": 1}}, {"a": {"b": 1}}) == ""
    assert difference("of", {"a": {"b": 1}}, {"a": {"b": 2}}) == "of.a.b was 1 and is 2"
    assert difference("of", {"a": 1}, {}) == "of.a was 1 and is 'nothing'"
    assert difference("of", {}, {"a": None}) == "of.a was 'nothing' and is None"
    assert difference("of", {"a": 1}, {"a": True}) == "of.a was 1 and is True"
    assert difference("of", {"a": {"b": 1}}, {"a": 1}) == "of.a was {'b': 1} and is 1"
