"""A Ray cluster for one command. Enter it before any import of Ray, which reads its settings from
the environment then."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).absolute().parents[2]
NUM_CPUS = 8


@contextmanager
def ray_of_our_own() -> Iterator[str]:
    """A Ray cluster of one node, protected by a token; yields its address."""
    scratch = Path(tempfile.mkdtemp(prefix="kvx-", dir="/tmp"))
    token = scratch / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    os.environ.pop("RAY_ADDRESS", None)
    os.environ.update(
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN_PATH=str(token),
        RAY_USAGE_STATS_ENABLED="0",
        RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
        PYTHONPATH=str(ROOT),
    )
    import ray  # it reads the settings above when it is imported

    try:
        context = ray.init(
            num_cpus=NUM_CPUS,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100 * 2**20,
            _temp_dir=str(scratch / "ray"),
        )
        yield context.address_info["address"]
    finally:
        ray.shutdown()
        shutil.rmtree(scratch, ignore_errors=True)
