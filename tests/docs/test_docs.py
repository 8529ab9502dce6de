"""Pages are correct: links lead somewhere, code and commands exist, generated pages are new."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from actors.cli import app
from kvcache.config import ClusterConfig, parse_config
from kvcache.config.tenants import MAX_NAME_CHARACTERS, MAX_NAMED_TENANTS
from tests.docs.pages import FENCE, PAGES, ROOT, fences, name_of
from tools import configuration_page as configuration_page_tool
from tools.configuration_page import PAGE, configuration_page

FOREIGN = {("docs/routers.md", "type:")}
"""Blocks that configure something else: llm-d's scorer. By page and first word."""
LINK = re.compile(r"(?<!!)\[[^\]\n]+\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")


def blocks(language: str) -> list[Any]:
    """Return the code blocks of a language in all pages, as parameters."""
    return [
        pytest.param(page, text, id=f"{name_of(page)}-{number}")
        for page in PAGES
        for number, (fenced, text) in enumerate(fences(page))
        if fenced == language
    ]


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    text = FENCE.sub("", page.read_text("utf-8"))
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles]
    return set(plain)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = []
    for match in LINK.finditer(FENCE.sub("", page.read_text("utf-8"))):
        target = match[1] or match[2]
        if re.match(r"[a-z]+:", target):
            continue  # no network in tests
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors_of(file)):
            broken.append(target)
    assert not broken, f"{name_of(page)} links to {broken}"


@pytest.mark.parametrize(("page", "code"), blocks("python"))
def test_python_in_pages_is_python_and_imports_what_exists(page: Path, code: str) -> None:
    tree = ast.parse(code)
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module(imports, []), name_of(page), "exec"), {})


@pytest.mark.parametrize(("page", "text"), blocks("yaml"))
def test_configurations_in_pages_are_read(page: Path, text: str) -> None:
    data = yaml.safe_load(text)
    if not isinstance(data, dict) or not set(data) <= set(ClusterConfig.model_fields):
        assert (name_of(page), str(text).split()[1]) in FOREIGN
        return
    model = {
        "name": "m",
        "max_model_len": 64,
        "layers": [{"kind": "full", "num_kv_heads": 4, "head_size": 8}],
    }
    parse_config({"model": model, **data}, name_of(page))


@pytest.mark.parametrize(("page", "text"), blocks("json"))
def test_json_in_pages_is_json(page: Path, text: str) -> None:
    for line in text.strip().splitlines() if "\n{" in text else [text]:
        json.loads(line)


@pytest.mark.parametrize(("page", "text"), blocks("bash"))
def test_commands_in_pages_exist_with_their_options(page: Path, text: str) -> None:
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        names = [Path(word).name for word in words]
        if "kvcache" in names and not line.lstrip().startswith(("pip", "#")):
            own = words[names.index("kvcache") + 1 :]
            own = own[: min((own.index(word) for word in ("&", "&&") if word in own), default=None)]
            require_command(own, line)
            parse_command(own, line)
        for word in words:
            if word.startswith(("examples/", "configs/", "docs/")) and "*" not in word:
                assert (ROOT / word).exists(), f"{name_of(page)}: {line}: there is no {word}"
            if word.startswith("make") and len(words) > 1 and words[0] == "make":
                targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
                assert words[1] in targets, f"{name_of(page)}: {line}"


OURS = ("tests", "examples", "bench", "tools")
"""Prefixes of modules in this tree that pages run."""


@pytest.mark.launches
def test_modules_in_pages_take_their_arguments() -> None:
    lines = []
    for page in PAGES:
        for language, text in fences(page):
            for line in text.replace("\\\n", " ").splitlines() if language == "bash" else ():
                words = shlex.split(line, comments=True)
                if "-m" in words and words[words.index("-m") + 1].startswith(OURS):
                    lines.append(shlex.join(words[words.index("-m") + 1 :]))
    assert len(lines) > 5
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.parse_modules"],
        input="\n".join(lines),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.parametrize(("page", "text"), [*blocks("bash"), *blocks("sh")])
def test_curl_sends_json(page: Path, text: str) -> None:
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    for before, word in pairwise(words):
        if before == "-d":
            assert isinstance(json.loads(word), dict)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_named_in_sentences_exist(page: Path) -> None:
    text = FENCE.sub("", page.read_text("utf-8"))
    for command in re.findall(r"`kvcache ([a-z][^`]*)`", text):
        words = re.sub(r"\\?\||\[|\]|\.\.\.", " ", command).split()
        require_command(words, f"{name_of(page)}: kvcache {command}")


@cache
def whole_command() -> Any:
    """The command line, made once, as that takes as long as a hundred calls of it."""
    return get_command(app)


def parse_command(words: list[str], line: str) -> None:
    """Fail unless the command line accepts the words. Nothing is executed."""
    command = whole_command()
    rest = list(words)
    while rest and rest[0] in getattr(command, "commands", {}):
        command = command.commands[rest.pop(0)]
    try:
        command.make_context(command.name, rest)
    except SystemExit as ended:  # --help, --version
        assert not ended.code, line
    except Exception as error:
        pytest.fail(f"{line}: {error}")


def require_command(words: list[str], line: str) -> None:
    """Fail unless the words are a command of ours and options that it has."""
    command = whole_command()
    rest = list(words)
    while rest and rest[0] in getattr(command, "commands", {}):
        command = command.commands[rest.pop(0)]
    assert command is not get_command(app) or not rest or rest[0].startswith("-"), line
    known = {option for parameter in command.params for option in parameter.opts}
    known |= {option for parameter in command.params for option in parameter.secondary_opts}
    unknown = {word.partition("=")[0] for word in rest if word.startswith("--")} - known
    unknown -= {"--help", "--version"}
    assert not unknown, f"{line}: {command.name} has no {sorted(unknown)}"
    takes_words = any(parameter.param_type_name == "argument" for parameter in command.params)
    stray = rest and not rest[0].startswith("-") and not takes_words
    assert not stray, f"{line}: {command.name} takes options only, not {rest[0]!r}"


def test_the_configuration_page_is_what_the_models_say() -> None:
    assert PAGE.read_text("utf-8") == configuration_page(), (
        "run: python -m tools.configuration_page"
    )


def test_help_does_not_write_the_configuration_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(configuration_page_tool, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(sys, "argv", ["configuration_page", "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        configuration_page_tool.main()
    assert capsys.readouterr().out.startswith("usage: python -m tools.configuration_page")
    assert not list(tmp_path.iterdir())


def test_the_configuration_page_has_the_bounds_of_tenants() -> None:
    text = PAGE.read_text("utf-8").partition("## `tenants`")[2].partition("## Kinds")[0]
    assert f"at most {MAX_NAMED_TENANTS} entries, of 1 to {MAX_NAME_CHARACTERS} char" in text
    for said in ("a share from `0.0` to `1.0`", "above 0, at most 1,000,000", "add up to 1.0"):
        assert said in text
    assert "kvcache.config" not in PAGE.read_text("utf-8")  # no name of a type


@pytest.mark.launches
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="MKDOCS IS NOT INSTALLED: THE SITE IS NOT TESTED")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    built = subprocess.run(
        [*command, "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert (tmp_path / "site" / "configuration.html").exists()


def test_the_table_of_waits_has_the_defaults_of_the_code() -> None:
    text = (ROOT / "docs" / "operations.md").read_text("utf-8")
    table = text.partition("<!-- waits -->")[2].partition("<!-- end of waits -->")[0]
    told = dict(re.findall(r"^\| \**`(\w+)`\** \| ([0-9.]+) s", table, re.MULTILINE))
    layer = {"kind": "full", "num_kv_heads": 4, "head_size": 8}
    config = parse_config({"model": {"name": "m", "max_model_len": 64, "layers": [layer]}})
    known = {
        name: getattr(config.deadlines, name) for name in told if hasattr(config.deadlines, name)
    }
    known["stall_s"] = config.stall_s
    assert {name: float(value) for name, value in told.items()} == known
    assert len(told) == table.count("\n| ") - 1
    for name in ("heartbeat_s", "resend_s"):
        assert f"`{name}` {getattr(config.transport, name):g} s" in table
    assert f"`offload.wait_s` {config.offload.wait_s:g} s" in table
    assert f"`closing_s` {config.deadlines.closing_s:.1f} s" in table
