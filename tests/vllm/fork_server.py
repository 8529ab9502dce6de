"""Forks programs from a process that has imported vLLM, its engine and the connector.

    python -m tests.vllm.fork_server SOCKET_DESCRIPTOR

A fresh engine spends most of its start importing the same modules in three processes. Here each
program, an engine or a maker of models, is forked from one process that has imported them; an
engine's core and workers are forked from the engine. All are processes of their own, in a session
per program. A request on the socket is a JSON object `{"module", "arguments", "environment"}` with
three file descriptors, which become the program's standard streams; the answer is its process id.
`{"pid"}` waits for the end of a program; the answer is its status. The server ends when the other
side of the socket is closed.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import socket
import sys
import traceback
from typing import Any

MAX_REQUEST = 1 << 20


def preload() -> None:
    """Import what engines need, so that vLLM starts its processes by fork."""
    sys.modules["ray"] = None  # type: ignore[assignment]  # installed with kvcache, never needed
    from vllm.utils import system_utils

    # vLLM's CPU backend demands spawn; before other modules take the function.
    system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    for name in (
        "vllm",
        "vllm.entrypoints.llm",
        "vllm.v1.attention.backends.cpu_attn",
        "vllm.v1.core.sched.scheduler",
        "vllm.v1.engine.core",
        "vllm.v1.executor.multiproc_executor",
        "vllm.v1.metrics.reader",
        "vllm.v1.pool.flash_maxsim",
        "vllm.v1.worker.cpu_worker",
        "vllm.entrypoints.anthropic.protocol",
        "vllm.entrypoints.launchers.cli_args",
        "vllm.model_executor.layers.quantization.online.base",
        "vllm.model_executor.models.blip2",
        "vllm.model_executor.models.llama",
        "vllm.plugins.lora_resolvers.filesystem_resolver",
        "compressed_tensors",
        "numpy.ma",
        "tests.vllm.make_model",
        "tests.vllm.make_adapter",
    ):
        importlib.import_module(name)
    importlib.import_module("kvcache.integrations.vllm").KVCacheConnector  # noqa: B018  # imports
    from vllm import logger, platforms
    from vllm.config.logging import LoggingConfig
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()  # it would import vLLM again
    # Both take long where so much is imported, and would be repeated in each process.
    logger.configure_logging(LoggingConfig())
    logger.dictConfig = lambda config: None
    platforms.current_platform.register_triton_kernel_overrides()
    platforms.current_platform.register_triton_kernel_overrides = lambda: None
    # vLLM collects garbage six times while it starts. Each time, it would visit, and so copy, all
    # that was imported here.
    gc.collect()
    gc.freeze()


def run(request: dict[str, Any], streams: list[int]) -> None:
    """Become the program; does not return."""
    status = 1
    try:
        os.setsid()
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.environ.update(request["environment"])
        importlib.import_module(request["module"]).main(*request["arguments"])
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main(descriptor: str) -> None:
    preload()
    ended: dict[int, int] = {}
    with socket.socket(fileno=int(descriptor)) as asked:
        while True:
            packet, streams, _, _ = socket.recv_fds(asked, MAX_REQUEST, 3)
            if not packet:
                return
            request = json.loads(packet)
            if "pid" in request:
                pid = request["pid"]
                if pid not in ended:  # a program may be waited for more than once
                    ended[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                answer = ended[pid]
            else:
                answer = os.fork()
                if not answer:
                    asked.close()
                    run(request, streams)
                for stream in streams:
                    os.close(stream)
            asked.send(str(answer).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
