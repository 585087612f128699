"""Generated pages equal the output of `make docs`, and are complete."""

from __future__ import annotations

import ast
import importlib
import operator
import re
from pathlib import Path

import torch

import dsv4_compile
from dsv4_compile.ops.common.define import OPS
from dsv4_compile.ops.common.kernels import KERNELS
from dsv4_compile.options import ENVIRONMENT, FUSE_PASSES, LOGGERS, OPTIONS, Options
from dsv4_compile.passes.pipeline import PASSES
from tests.tools import chart, docs


def _reached(entry: str) -> list[Path]:
    """Return the kernel files of the same family that `entry` imports or names, directly or not, without `entry`."""
    folder = (docs.ROOT / entry).parent
    names = {path.stem: path for path in sorted(folder.glob("*.py"))}
    first = Path(entry).stem
    seen, pending = {first}, [first]
    while pending:
        nodes = list(ast.walk(ast.parse(names[pending.pop()].read_text())))
        mentioned = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 1}
        mentioned |= {
            alias.name
            for node in nodes
            if isinstance(node, ast.ImportFrom) and (node.level, node.module) == (1, None)
            for alias in node.names
        }
        mentioned |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        new = {str(name).removeprefix(f"{folder.name}.") for name in mentioned} & set(names) - seen
        seen |= new
        pending += sorted(new)
    return [names[name] for name in sorted(seen - {first})]


def test_pages_are_what_make_docs_writes() -> None:
    assert [str(path.relative_to(docs.ROOT)) for path in docs.stale()] == [], "run `make docs`"


def test_ops_page_lists_every_op_with_its_schema() -> None:
    page = (docs.ROOT / docs.DOCS / "ops.md").read_text()
    assert sorted(re.findall(r"^\*\*`(\w+)`\*\* \(", page, re.MULTILINE)) == sorted(OPS)
    assert all(hasattr(torch.ops.dsv4, name) for name in OPS)
    written = [" ".join(block.split()) for block in re.findall(r"```\n(.*?)```", page, re.DOTALL)]
    assert sorted(written) == sorted(str(op._schema).removeprefix("dsv4::") for op in OPS.values())


def test_every_op_has_a_family_and_tests() -> None:
    assert {docs.family(op) for op in OPS} == set(docs.FAMILIES)
    assert [op for op in OPS if not docs.tests(op)] == []


def test_every_file_that_a_page_links_exists() -> None:
    for path, text in docs.pages().items():
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (path.parent / target).exists(), f"{path.relative_to(docs.ROOT)} links {target}"


def test_readme_links_every_page_or_its_folder() -> None:
    readme = (docs.ROOT / "README.md").read_text()
    pages = [path.relative_to(docs.ROOT) for path in (docs.ROOT / docs.DOCS).rglob("*.md")]
    linked = set(re.findall(r"\]\(([^)#]+)\)", readme))
    assert [page for page in pages if str(page) not in linked and str(page.parent) not in linked] == []


def test_readme_chart_shows_what_its_record_gives() -> None:
    assert chart.numbers(docs.ROOT / chart.PICTURE) == docs.headline(), "run `make docs`"
    assert f"]({chart.PICTURE})" in (docs.ROOT / "README.md").read_text()


def test_a_chart_keeps_the_numbers_that_it_was_drawn_from(tmp_path: Path) -> None:
    lines = [["", "eager", 'backend="dsv4" & more', "faster"], ["decode, <1> sequence", "4.0", "2.0", "2.0x"]]
    chart.draw(lines, tmp_path / "chart.svg")
    assert chart.numbers(tmp_path / "chart.svg") == lines


def test_options_page_has_every_variable_and_logger_that_the_package_names() -> None:
    sources = [path.read_text() for tree in ("dsv4_compile", "kernels", "lowering") for path in _python_files(tree)]
    variables = {name for text in sources for name in re.findall(r'"(DSV4_[A-Z_]+)"', text)}
    variables |= {name for text in sources for name in re.findall(r'environ(?:\.get\(|\[)"([A-Z_0-9]+)"', text)}
    assert variables - {"DSV4_SELF_CHECK", "TORCHELASTIC_USE_AGENT_STORE", "DSV4_PAGED", "DSV4_COMPILE"} <= set(
        ENVIRONMENT
    )
    loggers = {name for text in sources for name in re.findall(r'getLogger\("(dsv4_compile[\w.]*)"\)', text)}
    assert loggers <= set(LOGGERS)
    assert not [name for name in LOGGERS if name.removeprefix("dsv4_compile.").split(".")[0] not in _rooms()]


def _python_files(tree: str) -> list[Path]:
    return sorted((docs.ROOT / tree).rglob("*.py"))


def _rooms() -> set[str]:
    return {path.stem for path in (docs.ROOT / "dsv4_compile").iterdir()} | {"kernels", "lowering"}


def test_every_value_of_an_option_is_taken_and_every_default_is_one_of_them() -> None:
    for key, option in OPTIONS.items():
        name = key.replace("<op>", "mm").replace("<pass>", FUSE_PASSES[0])
        full = {"dsv4.cudagraph": "full"} if name.startswith("dsv4.cudagraph.") else {}
        if isinstance(option.values, type):
            assert type(option.default) is option.values
            continue
        assert option.default in option.values or "dsv4." in option.default
        for value in option.values:
            Options.parse(None, {**full, name: value}, ops=["mm"])


def test_readme_is_short() -> None:
    assert len((docs.ROOT / "README.md").read_bytes()) <= 6 * 1024
    assert len((docs.ROOT / "CHANGELOG.md").read_bytes()) <= 2 * 1024


def test_python_in_readme_names_what_exists() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (docs.ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        compile(block, "README.md", "exec")
        for name in re.findall(r"^from (dsv4_compile[.\w]+) import", block, re.MULTILINE):
            importlib.import_module(name)
        for name in re.findall(r"\bdsv4_compile((?:\.\w+)+)", block):
            operator.attrgetter(name[1:])(dsv4_compile)


def test_variants_are_kernel_files_that_their_launcher_reaches() -> None:
    named = [op for ops in docs.VARIANTS for op in ops]
    assert len(set(named)) == len(named)
    assert set(named) <= set(KERNELS)
    for op in named:
        entry = docs.ROOT / docs.files(op)["kernels"]
        files = {entry, *_reached(str(entry.relative_to(docs.ROOT)))}
        assert [path for path, _ in docs.variants(op) if docs.ROOT / "kernels" / path not in files] == [], op


def test_every_file_of_a_kernel_for_one_gpu_is_a_variant() -> None:
    listed = {path for variants in docs.VARIANTS.values() for path, _ in variants}
    files = (path for name in docs.FAMILIES for path in (docs.ROOT / "kernels" / name).glob("*_sm90*.py"))
    kernels = [path for path in files if re.search(r"^def \w+_kernel\(", path.read_text(), re.MULTILINE)]
    assert len(kernels) >= 9
    assert sorted({str(path.relative_to(docs.ROOT / "kernels")) for path in kernels} - listed) == []


def test_architecture_lists_the_fusion_passes_in_order() -> None:
    page = (docs.ROOT / docs.DOCS / "architecture.md").read_text()
    assert re.findall(r"^ *\| `(fuse_\w+)` \|", page, re.MULTILINE) == list(PASSES)


def test_every_source_file_that_a_page_names_exists() -> None:
    folders = ("dsv4_compile", "lowering", "kernels", "examples", "tests")
    files = [f"/{path.relative_to(docs.ROOT)}" for folder in folders for path in (docs.ROOT / folder).rglob("*.py")]
    example = "clamped_swiglu.py"  # the op that docs/adding-an-op.md adds
    for page in [docs.ROOT / "CONTRIBUTING.md", *docs.pages()]:
        text = re.sub(r"(?s)```python\n.*?```", "", page.read_text())
        for name in re.findall(r"(?<![\w/.])[\w/]+\.py\b", text):
            assert name.endswith(example) or any(path.endswith(f"/{name}") for path in files), f"{page.name}: {name}"
